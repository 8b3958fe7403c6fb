//! The control API over TLS, with curl, openssl and the program's own client.
//!
//! A test whose tool is missing says so and is skipped, unless `TENMIL_REQUIRE_TOOLS` is set.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use crate::served::ServeProcess;

const TOKEN: &str = "0123456789abcdef";

/// Two authorities, and certificates of a server and a client of the first; a client of the second.
struct Credentials {
    root: tempfile::TempDir,
}

impl Credentials {
    fn path(&self, name: &str) -> String {
        self.root.path().join(name).display().to_string()
    }

    /// Writes them; none if a tool is missing.
    fn write() -> Option<Self> {
        if !tenmil_rpc::HAS_CONTROL_TLS {
            println!("skipped: this program was built without the feature `tls`");
            return None;
        }
        if !crate::served::are_tools_installed(&["openssl", "curl"]) {
            return None;
        }
        let new = Self { root: tempfile::tempdir().unwrap() };
        for ca in ["ca", "other-ca"] {
            new.openssl(&format!(
                "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={ca} -keyout {ca}.key -out {ca}.pem"
            ));
        }
        for (name, ca, usage) in [
            ("server", "ca", "serverAuth"),
            ("renewed", "other-ca", "serverAuth"),
            ("client", "ca", "clientAuth"),
            ("other-client", "other-ca", "clientAuth"),
        ] {
            let extensions = format!(
                "subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage={usage}\n\
                 keyUsage=digitalSignature\nbasicConstraints=CA:FALSE\n"
            );
            std::fs::write(new.path("extensions"), extensions).unwrap();
            new.openssl(&format!(
                "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={name} \
                 -keyout {name}.key -out request"
            ));
            new.openssl(&format!(
                "x509 -req -in request -CA {ca}.pem -CAkey {ca}.key -CAcreateserial -days 2 \
                 -extfile extensions -out {name}.pem"
            ));
        }
        new.write_secret("token", TOKEN);
        Some(new)
    }

    fn write_secret(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
        let mode = PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(self.path(name), mode).unwrap();
    }

    fn openssl(&self, line: &str) {
        let output = Command::new("openssl")
            .args(line.split_whitespace())
            .current_dir(self.root.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "openssl {line}: {output:?}");
    }

    /// Starts a server with these options, at every address of the machine; returns its port, too.
    fn serve(&self, options: &str) -> (ServeProcess, u16) {
        let (errors, socket) = (self.path("errors"), self.path("nbd.sock"));
        let process = ServeProcess::start_shell_line(&format!(
            "{} serve ram:16m -l nbd:{socket} --control-listen https://0.0.0.0:0 \
             --control-tls-certificate {} --control-tls-key {} {options} 2>{errors}",
            env!("CARGO_BIN_EXE_tenmil"),
            self.path("server.pem"),
            self.path("server.key"),
        ));
        let log = std::fs::read_to_string(Path::new(&errors)).unwrap();
        let port = log.split("HTTP API at https://0.0.0.0:").nth(1);
        let port = port.and_then(|rest| rest.split('/').next()?.parse().ok());
        (process, port.unwrap_or_else(|| panic!("no address in {log}")))
    }

    /// Runs curl with the authority of the server.
    fn curl(&self, line: &str) -> Output {
        Command::new("curl")
            .args(["--silent", "--show-error", "--max-time", "20"])
            .args(line.split_whitespace())
            .current_dir(self.root.path())
            .output()
            .unwrap()
    }

    /// Status of a response.
    fn status(&self, line: &str) -> String {
        let output = self.curl(&format!("-o body -w %{{http_code}} {line}"));
        assert!(output.status.success(), "curl {line}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}

/// Runs `tenmil`; returns what it printed if it succeeded, or else its error.
fn tenmil(process: &ServeProcess, line: &str) -> Result<String, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let output = process.command(&words).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

#[test]
fn clients_with_the_token_are_served_over_tls() {
    let Some(files) = Credentials::write() else { return };
    let (process, port) = files.serve(&format!("--control-token {}", files.path("token")));
    let url = format!("https://127.0.0.1:{port}");
    let bearer = format!("--oauth2-bearer {TOKEN}");
    assert_eq!(files.status(&format!("--cacert ca.pem {url}/healthz")), "200");
    assert_eq!(files.status(&format!("--cacert ca.pem https://localhost:{port}/healthz")), "200");
    assert_eq!(files.status(&format!("--cacert ca.pem {url}/v1/process")), "401");
    assert_eq!(files.status(&format!("--cacert ca.pem {bearer} {url}/v1/process")), "200");
    let change = format!("--cacert ca.pem --json {{\"policy\":\"static\"}} {url}/v1/scheduler");
    assert_eq!(files.status(&change), "401");
    assert_eq!(files.status(&format!("{bearer} {change}")), "200");
    // Several records in both directions.
    let openapi = files.curl(&format!("--cacert ca.pem {bearer} {url}/v1/openapi.json"));
    assert!(serde_json::from_slice::<serde_json::Value>(&openapi.stdout).is_ok());
    std::fs::write(files.path("body"), vec![b'x'; 1_500_000]).unwrap();
    let large = format!("--cacert ca.pem {bearer} --json @body {url}/v1/scheduler");
    assert_eq!(files.status(&large), "400");
    // CURLE_PEER_FAILED_VERIFICATION
    assert_eq!(files.curl(&format!("--cacert other-ca.pem {url}/healthz")).status.code(), Some(60));
    let old = files.curl(&format!("--cacert ca.pem --tls-max 1.2 {url}/healthz"));
    // CURLE_SSL_CONNECT_ERROR
    assert_eq!(old.status.code(), Some(35), "{old:?}");
    let plain = files.curl(&format!("http://127.0.0.1:{port}/healthz"));
    let text = String::from_utf8(plain.stdout).unwrap();
    assert!(text.contains("expected https:// at this port"), "{text}");
    openssl_client_is_served(&files, port);
    program_is_its_own_client(&files, &process, port);
    assert_eq!(process.stop_with_sigterm(), Some(0));
}

fn openssl_client_is_served(files: &Credentials, port: u16) {
    let line = format!(
        "printf 'GET /healthz HTTP/1.1\\r\\nhost: a\\r\\nconnection: close\\r\\n\\r\\n' | timeout 20 \
         openssl s_client -connect 127.0.0.1:{port} -CAfile {} -verify_return_error \
         -verify_ip 127.0.0.1 -ign_eof 2>&1",
        files.path("ca.pem")
    );
    let text = crate::served::run("sh", &["-c", &line]);
    for expected in ["TLSv1.3", "Verify return code: 0 (ok)", "HTTP/1.1 200 OK"] {
        assert!(text.contains(expected), "no {expected} in {text}");
    }
}

fn program_is_its_own_client(files: &Credentials, process: &ServeProcess, port: u16) {
    let [ca, other_ca, token] = ["ca.pem", "other-ca.pem", "token"].map(|name| files.path(name));
    let get = |host: &str, options: &str| {
        tenmil(process, &format!("get process --json --control https://{host}:{port} {options}"))
    };
    let served = get("127.0.0.1", &format!("--control-ca {ca} --control-token {token}"));
    let served: serde_json::Value = serde_json::from_str(&served.unwrap()).unwrap();
    assert_eq!(served["pid"], process.pid());
    let by_name = get("localhost", &format!("--control-ca {ca} --control-token {token}"));
    assert!(by_name.is_ok(), "{by_name:?}");
    let refused = get("127.0.0.1", &format!("--control-ca {ca}")).unwrap_err();
    assert!(refused.contains("no token"), "{refused}");
    let refused = get("127.0.0.1", &format!("--control-ca {other_ca}")).unwrap_err();
    assert!(refused.contains("ertificate"), "{refused}");
    let refused = get("127.0.0.2", &format!("--control-ca {ca}")).unwrap_err();
    assert!(refused.contains("ertificate") || refused.contains("host"), "{refused}");
    let refused = get("127.0.0.1", "").unwrap_err();
    assert!(refused.contains("expected --control-ca FILE"), "{refused}");
    let plain = format!("get process --control http://192.0.2.1:{port} --control-token {token}");
    let refused = tenmil(process, &plain).unwrap_err();
    assert!(refused.contains("without encryption"), "{refused}");
    let options = format!("--control-ca {ca} --control-token {token}");
    let events = "events --json --count 1";
    let follow = format!("{events} --control https://127.0.0.1:{port} {options}");
    let words: Vec<&str> = follow.split_whitespace().collect();
    let mut command = process.command(&words);
    let follower = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    // It subscribes at an unknown moment, so changes are made until it has seen one.
    let url = format!("https://127.0.0.1:{port}/v1/scheduler");
    let change = format!(
        "for _ in $(seq 100); do kill -0 {} 2>&- || exit 0; curl -s --cacert {ca} \
         --oauth2-bearer {TOKEN} --json '{{\"policy\":\"static\"}}' -o /dev/null {url}; sleep 0.2; done",
        follower.id()
    );
    let mut changes = Command::new("sh").args(["-c", &change]).spawn().unwrap();
    let output = follower.wait_with_output().unwrap();
    changes.wait().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("\"set\"") && text.contains("client 127.0.0.1:"), "{text}");
}

#[test]
fn credentials_are_read_again_on_sighup_and_stay_if_one_is_unusable() {
    let Some(files) = Credentials::write() else { return };
    let (process, port) = files.serve(&format!("--control-token {}", files.path("token")));
    let get = |ca: &str, token: &str| {
        let url = format!("https://127.0.0.1:{port}/v1/process");
        files.curl(&format!(
            "-o body -w %{{http_code}} --cacert {ca}.pem --oauth2-bearer {token} {url}"
        ))
    };
    let is_served = |ca: &str, token: &str| get(ca, token).stdout == b"200";
    let reload_until = |kind: &str| {
        let mut command = process.command(&["events", "--json", "--count", "1", "--kind", kind]);
        let follower = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
        // It subscribes at an unknown moment.
        let reload = format!(
            "for _ in $(seq 100); do kill -0 {} 2>&- || exit 0; kill -HUP {}; sleep 0.2; done",
            follower.id(),
            process.pid()
        );
        let mut reloads = Command::new("sh").args(["-c", &reload]).spawn().unwrap();
        let output = follower.wait_with_output().unwrap();
        reloads.wait().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(is_served("ca", TOKEN));
    let (renewed, other_token) = ("renewed", "fedcba9876543210");
    for suffix in ["pem", "key"] {
        let [from, to] = [renewed, "server"].map(|name| files.path(&format!("{name}.{suffix}")));
        std::fs::rename(from, to).unwrap();
    }
    files.write_secret("token", other_token);
    assert!(is_served("ca", TOKEN), "not before it is requested");
    reload_until("control-credentials-reloaded");
    assert!(is_served("other-ca", other_token));
    assert_eq!(get("other-ca", TOKEN).stdout, b"401");
    // CURLE_PEER_FAILED_VERIFICATION
    assert_eq!(get("ca", other_token).status.code(), Some(60));
    // The token could be used, the certificate not: both stay.
    files.write_secret("token", TOKEN);
    std::fs::write(files.path("server.pem"), "no certificate").unwrap();
    let event = reload_until("control-credentials-error");
    assert!(event.contains("unchanged"), "{event}");
    assert!(is_served("other-ca", other_token));
}

#[test]
fn clients_need_a_certificate_of_the_configured_authority() {
    let Some(files) = Credentials::write() else { return };
    let (process, port) = files.serve(&format!("--control-tls-client-ca {}", files.path("ca.pem")));
    let url = format!("https://127.0.0.1:{port}");
    let own = "--cacert ca.pem --cert client.pem --key client.key";
    assert_eq!(files.status(&format!("{own} {url}/v1/process")), "200");
    let change = format!("{own} --json {{\"policy\":\"static\"}} {url}/v1/scheduler");
    assert_eq!(files.status(&change), "200", "the certificate is enough");
    assert_eq!(files.status(&format!("-H Origin:https://evil.example {change}")), "403");
    for wrong in ["", "--cert other-client.pem --key other-client.key"] {
        let refused = files.curl(&format!("--cacert ca.pem {wrong} {url}/healthz"));
        assert!(!refused.status.success(), "{refused:?}");
    }
    let [ca, chain, key] = ["ca.pem", "client.pem", "client.key"].map(|name| files.path(name));
    let get = format!("get process --json --control {url} --control-ca {ca}");
    let certificate = format!("--control-certificate {chain} --control-key {key}");
    assert!(tenmil(&process, &format!("{get} {certificate}")).unwrap().contains("\"pid\""));
    let refused = tenmil(&process, &get).unwrap_err();
    assert!(refused.contains("--control-certificate"), "{refused}");
    assert_eq!(process.stop_with_sigterm(), Some(0));
}

#[test]
fn address_that_other_machines_reach_needs_tls_and_authenticated_clients() {
    let Some(files) = Credentials::write() else { return };
    let tls = format!(
        "--control-tls-certificate {} --control-tls-key {}",
        files.path("server.pem"),
        files.path("server.key")
    );
    for (options, expected) in [
        ("--control-listen 0.0.0.0:0".to_owned(), "the API is not encrypted there"),
        ("--control-listen https://0.0.0.0:0".to_owned(), "no certificate of the server"),
        (format!("--control-listen https://0.0.0.0:0 {tls}"), "clients are not authenticated"),
        (format!("--control-listen 127.0.0.1:0 {tls}"), "no address uses it"),
        ("--control https://127.0.0.1:1".to_owned(), "it names another process"),
    ] {
        let line = format!("perf emu:null -t 1 {options}");
        let output = Command::new(env!("CARGO_BIN_EXE_tenmil"))
            .args(line.split_whitespace())
            .env("XDG_RUNTIME_DIR", files.root.path())
            .output()
            .unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{line}: {text}");
        assert!(text.contains(expected), "{line}: {text}");
    }
}
