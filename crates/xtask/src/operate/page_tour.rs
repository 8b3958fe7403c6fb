//! The web page in Chromium: every view, hostile names, keys, a narrow dark screen; and a subsystem that is
//! made, loaded, watched, limited and removed through the page.

use std::path::Path;
use std::time::Duration;

use serde_json::json;

use super::Report;
use super::browser::Browser;
use super::service::Service;

/// Time limit for the page to show something: it reads every 2 s.
const SHOWN_MAX: Duration = Duration::from_secs(20);
const NEW: &str = "nqn.2026-01.org.tenmil:made-by-the-page";
/// Limit that the page sets: less than the load needs.
const LIMIT_IOPS: u32 = 100;
/// Name of a volume that is markup and a script.
const HOSTILE: &str =
    "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>";

/// Views by name, and a text that each shows.
const VIEWS: [(&str, &str); 8] = [
    ("overview", "Health"),
    ("io", "aqu-sz"),
    ("exports", "Subsystems"),
    ("volumes", "db"),
    ("devices", "Paths to remote devices"),
    ("reactors", "Light threads"),
    ("events", "Pause"),
    ("methods", "/v1/process"),
];

/// Runs the tour.
pub(super) fn check_page(
    service: &mut Service,
    program: &str,
    directory: &Path,
    report: &mut Report,
) -> Result<(), String> {
    let mut browser = Browser::start(program, directory)?;
    browser.set_screen((1280, 900), "light")?;
    browser.open(&service.url())?;
    let tour = &mut Tour { browser, directory };
    report.check("the page asks for the token and is live", tour.log_in(service.token()));
    let made = service.api(
        &["--json", &json!({ "name": HOSTILE, "size_bytes": 1 << 20 }).to_string()],
        "v1/volume_create",
    );
    report.check("a volume with a hostile name is made", made.map(|_| String::new()));
    service.start_load(90)?;
    for (index, (view, text)) in VIEWS.into_iter().enumerate() {
        let key = (index + 1).to_string();
        report.check(&format!("view {view}, by key {key}"), tour.show_view(&key, view, text));
    }
    report.check("the hostile name is shown as text", tour.hostile_name_is_text());
    report.check("a subsystem is made", tour.make_subsystem());
    report.check("the page shows its load", {
        service.start_perf(NEW, 1, 60).and_then(|()| tour.watch_load())
    });
    report.check("it is limited", tour.limit());
    report.check("it is removed", tour.remove_subsystem());
    let saved = std::fs::read_to_string(service.config_file()).unwrap_or_default();
    report.check("the configuration file is as before, with its comment", {
        let is_kept = saved.starts_with("# kept") && !saved.contains(NEW);
        if is_kept { Ok(String::new()) } else { Err(saved) }
    });
    report.check("narrow and dark", tour.narrow_and_dark());
    let problems = tour.browser.take_problems();
    report.check("the page has reported no error and no violation of its policy", {
        if problems.is_empty() { Ok(String::new()) } else { Err(problems.join(" | ")) }
    });
    Ok(())
}

struct Tour<'a> {
    browser: Browser,
    directory: &'a Path,
}

/// Definitions for the expressions below: the button with a text in a row with a text, and filling a form.
const HELPERS: &str = "
  globalThis.row = text => [...document.querySelectorAll('main tr')].find(one => one.innerText.includes(text));
  globalThis.press = (within, text) => { const found = [...within.querySelectorAll('button')].find(one => one.textContent.startsWith(text)); found.click(); return true; };
  globalThis.fill = values => { const form = document.querySelector('dialog form'); for (const [name, value] of Object.entries(values)) form.elements[name].value = value; form.requestSubmit(); return true; };
  globalThis.shows = text => document.querySelector('main').innerText.includes(text);
  true";

impl Tour<'_> {
    fn wait(&mut self, text: &str) -> Result<(), String> {
        self.browser.wait_until(text, SHOWN_MAX)
    }

    fn shot(&mut self, name: &str) -> Result<String, String> {
        let path = self.directory.join(format!("{name}.png"));
        self.browser.screenshot(&path).map(|()| String::new())
    }

    fn log_in(&mut self, token: &str) -> Result<String, String> {
        self.wait("document.querySelector('dialog')?.open === true")?;
        self.browser.evaluate(HELPERS)?;
        let fill = format!(
            "document.querySelector('dialog input').value = {}; press(document.querySelector('dialog'), 'Continue')",
            json!(token)
        );
        self.browser.evaluate(&fill)?;
        self.wait("document.getElementById('state').textContent.startsWith('live')")?;
        Ok(String::new())
    }

    fn show_view(&mut self, key: &str, view: &str, text: &str) -> Result<String, String> {
        self.browser.press(key)?;
        self.wait(&format!("location.hash === {}", json!(format!("#{view}"))))?;
        self.wait(&format!("shows({})", json!(text)))?;
        // Charts need two readings.
        std::thread::sleep(Duration::from_secs(3));
        self.shot(view)
    }

    /// As text, and without its control characters: had it become markup, the title would differ.
    fn hostile_name_is_text(&mut self) -> Result<String, String> {
        self.go("volumes")?;
        self.wait(&format!("shows({})", json!(HOSTILE)))?;
        self.shot("hostile-name")?;
        let markup = "document.querySelectorAll('main img, main script').length";
        let found = self.browser.evaluate(&format!("{markup} + ' ' + document.title"))?;
        let expected = "0 Volumes – tenmil";
        if found == expected {
            Ok(String::new())
        } else {
            Err(format!("{found}, expected {expected}"))
        }
    }

    fn go(&mut self, view: &str) -> Result<(), String> {
        self.browser.evaluate(&format!("location.hash = {}", json!(view))).map(drop)
    }

    fn make_subsystem(&mut self) -> Result<String, String> {
        self.go("exports")?;
        self.wait("shows('Create subsystem')")?;
        self.browser.evaluate("press(document.querySelector('main'), 'Create subsystem')")?;
        let fill = json!({ "nqn": NEW, "allow_any_host": "true" });
        self.shot("create-subsystem")?;
        self.browser.evaluate(&format!("fill({fill})"))?;
        self.done()?;
        self.wait(&format!("row({}) !== undefined", json!(NEW)))?;
        self.browser.evaluate("press(document.querySelector('main'), 'Create namespace')")?;
        let fill = json!({ "subsystem": NEW, "uri": "ram:64m" });
        self.browser.evaluate(&format!("fill({fill})"))?;
        self.done()?;
        self.wait("[...document.querySelectorAll('main tr')].filter(one => one.innerText.includes('made-by')).length >= 2")?;
        self.shot("made-subsystem")
    }

    /// The dialog has closed, which is so if the change was made.
    fn done(&mut self) -> Result<(), String> {
        let closed = "!document.querySelector('dialog').open || document.querySelector('dialog .message.bad') !== null";
        self.wait(closed)?;
        let refused = "document.querySelector('dialog .message.bad')?.innerText ?? ''";
        match self.browser.evaluate(refused)?.as_str() {
            Some("") | None => Ok(()),
            Some(why) => Err(why.to_owned()),
        }
    }

    fn watch_load(&mut self) -> Result<String, String> {
        self.go("io")?;
        let chosen = format!(
            "(() => {{ const one = document.getElementById('io-export'); if (one.value !== {0}) {{ one.value = {0}; \
             one.dispatchEvent(new Event('change')); }} return one.value === {0}; }})()",
            json!(NEW)
        );
        self.wait(&chosen)?;
        let rate = "Number(row('made-by')?.cells[3].innerText ?? 0)";
        self.wait(&format!("{rate} > 0"))?;
        std::thread::sleep(Duration::from_secs(6));
        self.shot("watched-load")?;
        Ok(format!("{} reads/s", self.browser.evaluate(rate)?))
    }

    /// Limits the namespace by the button of its row, and waits until the table of limits has it and the I/O view
    /// shows the rate and the time waited.
    fn limit(&mut self) -> Result<String, String> {
        self.go("exports")?;
        let found = |condition: &str| {
            format!(
                "[...document.querySelectorAll('main tr')].find(one => \
                 one.innerText.includes('made-by') && {condition})"
            )
        };
        let namespace = found("one.innerText.includes('ram:64m')");
        let row = found("one.cells[0].innerText === 'namespace'");
        self.wait(&format!("{namespace} !== undefined"))?;
        self.browser.evaluate(&format!("press({namespace}, 'Limit')"))?;
        self.browser.evaluate(&format!("fill({})", json!({ "iops": LIMIT_IOPS.to_string() })))?;
        self.wait("document.querySelector('dialog [data-result=done]') !== null || document.querySelector('dialog .message.bad') !== null")?;
        let refused = "document.querySelector('dialog .message.bad')?.innerText ?? ''";
        match self.browser.evaluate(refused)?.as_str() {
            Some("") | None => {}
            Some(why) => return Err(why.to_owned()),
        }
        self.browser.evaluate("document.querySelector('dialog').close(); true")?;
        self.wait(&format!("{row}?.innerText.includes('{LIMIT_IOPS}') === true"))?;
        self.shot("limits")?;
        self.go("io")?;
        let cell = |name: &str| {
            let header = "[...document.querySelectorAll('main th')]";
            format!(
                "Number(row('made-by')?.cells[{header}.findIndex(one => one.textContent === {})]?.innerText ?? NaN)",
                json!(name)
            )
        };
        let [reads, writes, waited, wait] = ["r/s", "w/s", "limited/s", "limit wait ms"].map(cell);
        let most = 1.2 * f64::from(LIMIT_IOPS);
        self.wait(&format!(
            "{reads} + {writes} > 0 && {reads} + {writes} < {most} && {waited} > 0 && {wait} > 0"
        ))?;
        std::thread::sleep(Duration::from_secs(4));
        self.shot("limited")?;
        let shown = format!(
            "`${{{reads} + {writes}}} I/O/s, of which ${{{waited}}} waited ${{{wait}}} ms in the mean`"
        );
        let shown = self.browser.evaluate(&shown)?;
        self.go("exports")?;
        self.wait(&format!("row({}) !== undefined", json!(NEW)))?;
        Ok(format!("{LIMIT_IOPS} I/O/s: {}", shown.as_str().unwrap_or_default()))
    }

    fn remove_subsystem(&mut self) -> Result<String, String> {
        self.browser.evaluate(&format!("press(row({}), 'Delete')", json!(NEW)))?;
        self.browser.evaluate("fill({})")?;
        self.done()?;
        self.wait(&format!("row({}) === undefined", json!(NEW)))?;
        self.shot("removed-subsystem")
    }

    fn narrow_and_dark(&mut self) -> Result<String, String> {
        self.browser.set_screen((390, 844), "dark")?;
        for (view, text) in VIEWS {
            self.go(view)?;
            self.wait(&format!("shows({})", json!(text)))?;
            let width = "document.documentElement.scrollWidth";
            let found = self.browser.evaluate(width)?;
            if found.as_u64().is_none_or(|width| width > 390) {
                return Err(format!("view {view} is {found} wide, expected 390"));
            }
            self.shot(&format!("narrow-{view}"))?;
        }
        Ok(String::new())
    }
}
