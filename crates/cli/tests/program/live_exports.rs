//! NBD exports beside NVMe/TCP subsystems in one process: from the file, from the command line, and while
//! clients are connected.

use std::path::PathBuf;

use crate::served::{ServeProcess, are_tools_installed, run};
use serde_json::{Value, json};

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");
const NQN: &str = "nqn.2026-01.org.tenmil:disks";

/// A target, and the directory of its sockets and files.
struct Target {
    served: ServeProcess,
    root: tempfile::TempDir,
}

impl Target {
    /// Serves a configuration in which `DIR` is a directory of its own.
    fn with_config(text: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let text = text.replace("DIR", root.path().to_str().unwrap());
        let file = root.path().join("target.toml");
        std::fs::write(&file, text).unwrap();
        let line = format!("{TENMIL} serve --json --config '{}'", file.display());
        Self { served: ServeProcess::start_shell_line(&line), root }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn ready(&self) -> Value {
        serde_json::from_str(&self.served.ready).unwrap()
    }

    fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.served.stdout_of_rpc_command(&format!("{line} --json"))).unwrap()
    }

    fn error(&self, line: &str) -> String {
        let output = self.served.command(&line.split(' ').collect::<Vec<_>>()).output().unwrap();
        assert!(!output.status.success(), "{line}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    /// The names that a client is offered at a socket.
    fn listed(&self, socket: &str) -> Vec<String> {
        let uri = format!("nbd+unix:///?socket={}", self.path(socket).display());
        let listed: Value =
            serde_json::from_str(&run("nbdinfo", &["--list", "--json", &uri])).unwrap();
        let exports = listed["exports"].as_array().unwrap().iter();
        exports.map(|export| export["export-name"].as_str().unwrap().to_owned()).collect()
    }

    fn size(&self, socket: &str, name: &str) -> String {
        let uri = format!("nbd+unix:///{name}?socket={}", self.path(socket).display());
        run("nbdinfo", &["--size", &uri]).trim().to_owned()
    }

    fn nvme_uri(&self, nsid: u32) -> String {
        let ready = self.ready();
        let listen = ready["listen"].as_array().unwrap().iter().filter_map(Value::as_str);
        let address = listen.clone().find(|at| at.starts_with("tcp://")).unwrap();
        format!("{address}/{NQN}?ns={nsid}")
    }
}

const TEXT: &str = r#"
[[listener]]
address = "127.0.0.1:0"

[[device]]
name = "disk"
uri = "ram:4m"

[[subsystem]]
nqn = "nqn.2026-01.org.tenmil:disks"
allow-any-host = true

[[subsystem.namespace]]
uri = "device:disk"

# The same device over NBD.
[[export]]
name = "disk"
uri = "device:disk"
listen = ["nbd:DIR/a.sock"]

[[export]]
name = "images"
uri = "ram:8m"
read-only = true
listen = ["nbd:DIR/a.sock", "nbd:DIR/b.sock"]
"#;

#[test]
fn several_exports_are_selected_by_their_names() {
    if !are_tools_installed(&["nbdinfo"]) {
        return;
    }
    let target = Target::with_config(TEXT);
    assert_eq!(target.listed("a.sock"), ["disk", "images"]);
    assert_eq!(target.listed("b.sock"), ["images"]);
    assert_eq!(target.size("a.sock", "disk"), "4194304");
    assert_eq!(target.size("a.sock", "images"), "8388608");
    // The empty name selects the only export of a listener, and none of several.
    assert_eq!(target.size("b.sock", ""), "8388608");
    let uri = format!("nbd+unix:///?socket={}", target.path("a.sock").display());
    let refused = std::process::Command::new("nbdinfo").args(["--size", &uri]).output().unwrap();
    assert!(!refused.status.success());
    let refused = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.contains("no export") || refused.contains("unknown"), "{refused}");
    let exports = target.json("get exports");
    let names: Vec<_> = exports.as_array().unwrap().iter().map(|row| &row["name"]).collect();
    assert_eq!(names, ["disk", "images"]);
    assert_eq!(target.ready()["exports"].as_array().unwrap().len(), 2, "{}", target.served.ready);
    assert_eq!(target.served.stop_with_sigterm(), Some(0));
}

#[test]
fn one_device_is_served_over_nvme_tcp_and_nbd_at_once() {
    if !are_tools_installed(&["qemu-img", "nbdinfo"]) {
        return;
    }
    let target = Target::with_config(TEXT);
    let source = target.path("source");
    std::fs::write(&source, b"0123456789abcdef".repeat(4 << 16)).unwrap();
    let nbd = format!("nbd+unix:///disk?socket={}", target.path("a.sock").display());
    run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", source.to_str().unwrap(), &nbd]);
    // What the NBD client has written is what the host reads.
    let back = target.path("back");
    let file = format!("file:{}?size=4m", back.display());
    run(TENMIL, &["copy", &target.nvme_uri(1), &file]);
    assert_eq!(std::fs::read(&source).unwrap(), std::fs::read(&back).unwrap());
    // The statistics of the export are those of its clients.
    let rows = target.json("get io_statistics by=export");
    let row = |protocol: &str, export: &str| {
        let all = rows.as_array().unwrap().iter();
        all.clone()
            .find(|row| row["protocol"] == protocol && row["export"] == export)
            .unwrap()
            .clone()
    };
    let (nbd, nvme) = (row("nbd", "disk"), row("nvme-tcp", NQN));
    assert!(nbd["written_bytes"].as_u64() >= Some(4 << 20), "{nbd}");
    assert!(nvme["read_bytes"].as_u64() >= Some(4 << 20), "{nvme}");
    assert_eq!(nvme["written_bytes"], 0, "{nvme}");
    assert!(nbd["read_bytes"].as_u64() < Some(4 << 20), "{nbd}");
}

#[test]
fn exports_are_created_and_deleted_while_clients_are_connected() {
    if !are_tools_installed(&["nbdinfo"]) {
        return;
    }
    let target = Target::with_config(TEXT);
    let before = std::fs::read_to_string(target.path("target.toml")).unwrap();
    let socket = format!("nbd:{}", target.path("c.sock").display());
    let made = target.json(&format!("export create new ram:2m {socket}"));
    assert_eq!(
        (&made["object"]["name"], &made["object"]["listen"]),
        (&json!("new"), &json!([socket]))
    );
    assert_eq!(
        (target.listed("c.sock"), target.size("c.sock", "new")),
        (vec!["new".to_owned()], "2097152".to_owned())
    );
    let limited = target.json("set export_limits name=new iops=5000 burst_ms=2000");
    assert_eq!(
        (&limited["object"]["iops"], &limited["object"]["burst_ms"]),
        (&json!(5000), &json!(2000))
    );
    assert_eq!(limited["changes"], json!(["changes rate limits of new"]));
    let text = std::fs::read_to_string(target.path("target.toml")).unwrap();
    assert!(text.contains("limits = { iops = 5000, burst = \"2s\" }\n"), "{text}");
    assert_eq!(target.json("get exports")[2]["limit_iops"], 5000);
    for (line, expected) in [
        (format!("export create new ram:1m {socket}"), "`new` exists already"),
        (
            format!("export create other file:/nowhere/at/all {socket}"),
            "create export: `uri`: serve file:/nowhere",
        ),
        ("export create other ram:1m tcp:x".to_owned(), "`tcp:x` is no address"),
        (
            "export create other ram:1m nbds://127.0.0.1:0".to_owned(),
            "there is no certificate and no key",
        ),
        (
            "export create other ram:1m nbd://192.0.2.1:0".to_owned(),
            "could write there without authentication",
        ),
        ("export delete other".to_owned(), "delete export: no `other`"),
    ] {
        let error = target.error(&line);
        assert!(error.contains(expected), "{line}: {error}");
    }
    // The host and the other clients are not disturbed.
    let uri = target.nvme_uri(1);
    let load = ["perf", &uri, "-t", "2", "-w", "randrw", "--overwrite", "--json"];
    let mut load = std::process::Command::new(TENMIL)
        .args(load)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    target.json("export delete disk");
    assert_eq!(target.listed("a.sock"), ["images"]);
    target.json(&format!("export create disk device:disk nbd:{}", target.path("a.sock").display()));
    assert_eq!(target.size("a.sock", "disk"), "4194304");
    target.json("export delete new");
    assert!(!target.path("c.sock").exists(), "its socket has gone");
    assert!(load.wait().unwrap().success());
    let after = std::fs::read_to_string(target.path("target.toml")).unwrap();
    assert!(
        before.contains("# The same device") && !after.contains("# The same device"),
        "{after}"
    );
    assert_eq!(target.served.stop_with_sigterm(), Some(0));
}

#[test]
fn command_line_serves_several_devices_over_both_protocols() {
    if !are_tools_installed(&["nbdinfo"]) {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let line = format!(
        "{TENMIL} serve --json ram:4m ram:8m -l tcp://127.0.0.1:0 -l nbd:{}/a.sock --nqn {NQN}",
        root.path().display()
    );
    let target = Target { served: ServeProcess::start_shell_line(&line), root };
    assert_eq!(target.listed("a.sock"), ["ram:4m", "ram:8m"]);
    assert_eq!(target.size("a.sock", "ram:8m"), "8388608");
    let host = run(TENMIL, &["identify", &target.nvme_uri(2), "--json"]);
    let host: Value = serde_json::from_str(&host).unwrap();
    assert_eq!(host["namespaces"]["2"]["identify"]["nvmcap"], 8 << 20);
    let root = tempfile::tempdir().unwrap();
    let line = format!(
        "{TENMIL} serve --json ram:4m ram:8m -l nbd:{}/a.sock --read-only",
        root.path().display()
    );
    let target = Target { served: ServeProcess::start_shell_line(&line), root };
    assert_eq!(target.listed("a.sock").len(), 2);
    assert_eq!(target.served.stop_with_sigterm(), Some(0));
}
