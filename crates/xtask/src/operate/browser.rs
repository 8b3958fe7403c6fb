//! Headless Chromium, driven by its debugging protocol over a pair of pipes.
//!
//! `--remote-debugging-pipe` reads messages from descriptor 3 and writes to 4, each a JSON object that ends
//! with a zero byte. A shell gives it standard input and output as these.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longest wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(100);

/// A browser with one page. Dropping it ends it.
pub(super) struct Browser {
    child: Child,
    requests: ChildStdin,
    answers: Receiver<Value>,
    session: Option<String>,
    id: u64,
    /// Errors and violations that the page has reported.
    problems: Vec<String>,
}

/// Name of an installed Chromium.
pub(super) fn find_program() -> Option<&'static str> {
    let names = ["chromium-headless-shell", "chromium", "google-chrome"];
    names.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok())
}

impl Browser {
    /// Starts the program with an empty profile in `directory`.
    pub(super) fn start(program: &str, directory: &Path) -> Result<Self, String> {
        let profile = directory.join("profile");
        let _ = std::fs::remove_dir_all(&profile);
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null", program]);
        command.args(["--headless", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run"]);
        // The sandbox of Chromium needs rights that root in a container lacks; the page is our own.
        command.arg("--no-sandbox").arg(format!("--user-data-dir={}", profile.display()));
        let log = std::fs::File::create(directory.join("chromium.log"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(log.map_err(|why| why.to_string())?);
        let mut child = command.spawn().map_err(|why| format!("start {program}: {why}"))?;
        let (Some(requests), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("start a browser: it has no pipes".to_owned());
        };
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            let messages = BufReader::new(output).split(0).map_while(Result::ok);
            let mut parsed = messages.filter_map(|bytes| serde_json::from_slice(&bytes).ok());
            parsed.all(|message: Value| sender.send(message).is_ok());
        });
        let problems = Vec::new();
        let mut browser = Self { child, requests, answers, session: None, id: 0, problems };
        let target = browser.call("Target.createTarget", &json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", &attach)?;
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Runtime.enable", "Log.enable", "Page.enable"] {
            browser.call(domain, &json!({}))?;
        }
        Ok(browser)
    }

    /// Opens an address.
    pub(super) fn open(&mut self, url: &str) -> Result<(), String> {
        self.call("Page.navigate", &json!({ "url": url })).map(drop)
    }

    /// Size of the page in CSS pixels, and its color scheme.
    pub(super) fn set_screen(&mut self, size: (u32, u32), scheme: &str) -> Result<(), String> {
        let metrics = json!({
            "width": size.0, "height": size.1, "deviceScaleFactor": 1, "mobile": size.0 < 600,
        });
        self.call("Emulation.setDeviceMetricsOverride", &metrics)?;
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.call("Emulation.setEmulatedMedia", &json!({ "features": features })).map(drop)
    }

    /// Value of a JavaScript expression; a promise is awaited.
    pub(super) fn evaluate(&mut self, text: &str) -> Result<Value, String> {
        let request = json!({ "expression": text, "awaitPromise": true, "returnByValue": true });
        let answer = self.call("Runtime.evaluate", &request)?;
        let exception = &answer["exceptionDetails"];
        if !exception.is_null() {
            return Err(format!("{text}: {}", exception["exception"]["description"]));
        }
        Ok(answer["result"]["value"].clone())
    }

    /// Waits until an expression is true.
    pub(super) fn wait_until(&mut self, text: &str, limit: Duration) -> Result<(), String> {
        let end = Instant::now() + limit;
        loop {
            if self.evaluate(text)? == true {
                return Ok(());
            }
            if Instant::now() > end {
                let shown = self.evaluate("document.body.innerText.slice(0, 400)")?;
                return Err(format!(
                    "not within {} s: {text}; the page shows {shown}",
                    limit.as_secs()
                ));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Presses and releases a key.
    pub(super) fn press(&mut self, key: &str) -> Result<(), String> {
        for kind in ["keyDown", "keyUp"] {
            let text = if kind == "keyDown" && key.len() == 1 { key } else { "" };
            self.call(
                "Input.dispatchKeyEvent",
                &json!({ "type": kind, "key": key, "text": text }),
            )?;
        }
        Ok(())
    }

    /// Writes what is visible as a PNG file.
    pub(super) fn screenshot(&mut self, path: &Path) -> Result<(), String> {
        let answer = self.call("Page.captureScreenshot", &json!({}))?;
        let bytes = decode_base64(answer["data"].as_str().unwrap_or_default());
        std::fs::write(path, bytes).map_err(|why| format!("{}: {why}", path.display()))
    }

    /// Errors that the page has reported since the last call.
    pub(super) fn take_problems(&mut self) -> Vec<String> {
        std::mem::take(&mut self.problems)
    }

    fn call(&mut self, method: &str, parameters: &Value) -> Result<Value, String> {
        self.id += 1;
        let mut request = json!({ "id": self.id, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            request["sessionId"] = session.as_str().into();
        }
        let mut bytes = request.to_string().into_bytes();
        bytes.push(0);
        self.requests.write_all(&bytes).map_err(|why| format!("{method}: {why}"))?;
        let end = Instant::now() + ANSWER_MAX;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let message = self.answers.recv_timeout(left).map_err(|why| match why {
                RecvTimeoutError::Timeout => format!("{method}: no answer of the browser"),
                RecvTimeoutError::Disconnected => format!("{method}: the browser has ended"),
            })?;
            if message["id"] == self.id {
                if !message["error"].is_null() {
                    return Err(format!("{method}: {}", message["error"]["message"]));
                }
                return Ok(message["result"].clone());
            }
            self.problems.extend(problem_of(&message));
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Error of the page: an exception, or a violation of its policy. A request that the server answers with an
/// error is none: the page asks for parts that a process may lack.
fn problem_of(message: &Value) -> Option<String> {
    let parameters = &message["params"];
    match message["method"].as_str()? {
        "Runtime.exceptionThrown" => Some(parameters["exceptionDetails"].to_string()),
        "Log.entryAdded" => {
            let entry = &parameters["entry"];
            let is_error = entry["level"] == "error" && entry["source"] != "network";
            is_error.then(|| entry["text"].to_string())
        }
        _ => None,
    }
}

/// RFC 4648, without line breaks.
fn decode_base64(text: &str) -> Vec<u8> {
    let value = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let (mut bytes, mut bits, mut count) = (Vec::with_capacity(text.len() / 4 * 3), 0_u32, 0);
    for six in text.bytes().map_while(value) {
        bits = bits << 6 | u32::from(six);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count).to_le_bytes()[0]);
            bits &= (1 << count) - 1;
        }
    }
    bytes
}
