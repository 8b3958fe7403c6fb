//! `tenmil serve` drops its rights once it serves: over every transport, on every thread, and on kernels
//! that lack a part of what that needs.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::served::{ServeProcess, are_tools_installed, run, threads_of};
use serde_json::{Value, json};
use tenmil_linux::sandbox::{AllowedCalls, CallGroup, SocketFamilies, simulate_missing_calls};

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");
const NQN: &str = "nqn.2026-01.org.tenmil:disk";

/// A server and a load for it.
struct ServedCase {
    name: &'static str,
    /// Words after `serve`; `DIR` is a directory of its own.
    words: &'static str,
    load: fn(&ServeProcess, &Path),
    tools: &'static [&'static str],
}

const CASES: &[ServedCase] = &[
    ServedCase {
        name: "NVMe/TCP",
        words: "'file:DIR/disk?size=32m' ram:32m -l tcp://127.0.0.1:0 --state-dir DIR/state",
        load: verify_over_tcp,
        tools: &[],
    },
    ServedCase {
        name: "NVMe/TCP, io_uring",
        words: "'file:DIR/disk?size=32m' -l tcp://127.0.0.1:0 --socket engine=io_uring \
                --socket zero-copy=16k --scheduler dynamic",
        load: verify_over_tcp,
        tools: &[],
    },
    ServedCase {
        name: "NVMe/TCP, threads",
        words: "'file:DIR/disk?size=32m&engine=threads' -l tcp://127.0.0.1:0 --poll always",
        load: verify_over_tcp,
        tools: &[],
    },
    ServedCase {
        name: "NBD",
        words: "'file:DIR/disk?size=32m' -l nbd:DIR/socket -l nbd://127.0.0.1:0 --allow-resize",
        load: copy_over_nbd,
        tools: &["qemu-img", "nbdinfo"],
    },
    ServedCase {
        name: "vfio-user",
        words: "'file:DIR/disk?size=32m' -l vfio-user:DIR/socket",
        load: verify_over_vfio_user,
        tools: &[],
    },
    ServedCase {
        name: "vhost-user",
        words: "'file:DIR/disk?size=32m' -l vhost-user:DIR/socket",
        load: |_, _| {},
        tools: &[],
    },
];

impl ServedCase {
    /// Starts the server; `before` and `more` are words of its command line.
    fn start(&self, directory: &Path, before: &str, more: &str) -> ServeProcess {
        let words = self.words.replace("DIR", directory.to_str().unwrap());
        ServeProcess::start_shell_line(&format!("{before}{TENMIL} serve {words} {more}"))
    }
}

fn verify(served: &ServeProcess, uri: &str) {
    for pattern in ["randrw", "flush-mix", "trim"] {
        let words = ["perf", uri, "-w", pattern, "--overwrite", "-t", "0.5", "-q", "16"];
        let mut command = served.command(&words);
        if pattern != "trim" {
            command.arg("--verify");
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{pattern}: {output:?}");
    }
}

fn verify_over_tcp(served: &ServeProcess, _: &Path) {
    let address = served.ready.split_whitespace().find(|word| word.starts_with("tcp://")).unwrap();
    verify(served, &format!("{address}/{NQN}/1"));
    served.stdout_of_rpc_command("get nvme_connections");
}

fn verify_over_vfio_user(served: &ServeProcess, directory: &Path) {
    verify(served, &format!("vfio-user:{}/socket", directory.display()));
}

fn copy_over_nbd(served: &ServeProcess, directory: &Path) {
    let (source, back) = (directory.join("source"), directory.join("back"));
    std::fs::write(&source, b"0123456789abcdef".repeat(2 << 20)).unwrap();
    let uri = format!("nbd+unix:///?socket={}/socket", directory.display());
    let address = served.ready.split_whitespace().find(|word| word.starts_with("nbd://")).unwrap();
    let [source, back] = [&source, &back].map(|path| path.to_str().unwrap());
    run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", source, &uri]);
    run("qemu-img", &["convert", "-f", "raw", "-O", "raw", address, back]);
    assert_eq!(std::fs::read(source).unwrap(), std::fs::read(back).unwrap());
    run("nbdinfo", &["--map", &uri]);
    served.stdout_of_rpc_command("set export size_bytes=67108864");
}

/// Whether a measure is in force, or the report has the reason why this kernel does not have it.
fn is_taken(report: &Value, measure: &str) -> bool {
    let is_named = |text: &Value| text.as_str().unwrap().to_lowercase().starts_with(measure);
    report[measure] == "in force" || report["obstacles"].as_array().unwrap().iter().any(is_named)
}

/// Whether this kernel restricts paths and system calls: what is denied then can be tested.
fn restricts_everything(report: &Value) -> bool {
    let is_whole = report["obstacles"] == json!([]);
    if !is_whole {
        println!("skipped in part: {}", report["obstacles"]);
    }
    is_whole
}

/// What an operator asks of any server.
fn ask_everything(served: &ServeProcess) {
    for name in ["process", "environment", "reactors", "threads", "pollers", "scheduler"] {
        served.stdout_of_rpc_command(&format!("get {name}"));
    }
}

#[test]
fn server_of_every_transport_drops_its_rights_and_serves() {
    for case in CASES.iter().filter(|case| are_tools_installed(case.tools)) {
        let root = tempfile::tempdir().unwrap();
        let served = case.start(root.path(), "", "");
        (case.load)(&served, root.path());
        ask_everything(&served);
        let report = served.rights_after_drop();
        for measure in ["capabilities", "no_new_privs", "seccomp", "landlock"] {
            assert!(is_taken(&report, measure), "{}: {measure} {report}", case.name);
        }
        let threads = threads_of(served.pid()).len();
        assert!(report["threads"].as_u64() >= Some(3) && threads >= 3, "{}: {report}", case.name);
        let paths = report["paths"].as_array().unwrap();
        let disk = root.path().canonicalize().unwrap().join("disk");
        let rule = paths.iter().find(|rule| rule["path"] == disk.to_str().unwrap());
        if !restricts_everything(&report) {
            continue;
        }
        assert_eq!(rule.unwrap()["access"], "read-write", "{}: {report}", case.name);
        let whole = root.path().canonicalize().unwrap();
        let rule = paths.iter().find(|rule| rule["path"] == whole.to_str().unwrap());
        assert!(rule.is_none_or(|rule| rule["access"] == "remove"), "{}: {report}", case.name);
        assert_eq!(served.stop_with_sigterm(), Some(0), "{}", case.name);
        // Socket files are removed at the end.
        assert!(!root.path().join("socket").exists(), "{}", case.name);
    }
}

#[test]
fn system_calls_of_every_transport_are_in_the_list() {
    if !are_tools_installed(&["strace"]) {
        return;
    }
    let allowed = AllowedCalls {
        groups: CallGroup::ALL.to_vec(),
        families: SocketFamilies { inet: true, netlink: true },
    };
    let mut allowed: BTreeSet<String> = allowed.names().into_iter().map(str::to_owned).collect();
    // Fails with ENOSYS under the filter; the C library uses `clone` then.
    allowed.insert("clone3".to_owned());
    for case in CASES.iter().filter(|case| are_tools_installed(case.tools)) {
        let root = tempfile::tempdir().unwrap();
        let trace = root.path().join("trace");
        let strace = format!("strace -D -f -q -e signal=none -o '{}' ", trace.display());
        let served = case.start(root.path(), &strace, "--sandbox=off");
        (case.load)(&served, root.path());
        ask_everything(&served);
        let pid = served.pid();
        assert_eq!(served.stop_with_sigterm(), Some(0), "{}", case.name);
        let found = calls_after_ready(&wait_for_whole_trace(&trace, pid));
        assert!(found.len() > 20, "{}: {found:?}", case.name);
        let missing: Vec<_> = found.difference(&allowed).collect();
        assert!(
            missing.is_empty(),
            "{}: {missing:?} are used and denied by the filter: add them to \
             crates/linux/src/sandbox/system_calls.rs, or do without them",
            case.name
        );
    }
}

/// The tracer writes the rest after the end of the process.
fn wait_for_whole_trace(trace: &Path, pid: u32) -> String {
    let end = format!("{pid} +++ exited");
    for _ in 0..100 {
        let text = std::fs::read_to_string(trace).unwrap();
        let is_whole = text
            .lines()
            .any(|line| line.split_whitespace().collect::<Vec<_>>().join(" ").starts_with(&end));
        if is_whole {
            return text;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    std::fs::read_to_string(trace).unwrap()
}

/// Names of the calls after the ready message.
fn calls_after_ready(trace: &str) -> BTreeSet<String> {
    let later = trace.lines().skip_while(|line| !line.contains("write(1, \"ready"));
    let name = |line: &str| {
        let call = line.split_once(char::is_whitespace)?.1.trim_start();
        let call = call.strip_prefix("<... ").unwrap_or(call);
        let end =
            call.find(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'))?;
        let (name, rest) = call.split_at(end);
        (rest.starts_with('(') || rest.starts_with(" resumed")).then(|| name.to_owned())
    };
    later.filter_map(name).filter(|name| !name.is_empty()).collect()
}

#[test]
fn reload_opens_devices_anywhere_or_where_an_option_permits_and_names_the_fix() {
    let root = tempfile::tempdir().unwrap();
    let (disks, other) = (root.path().join("disks"), root.path().join("other"));
    [&disks, &other].iter().for_each(|path| std::fs::create_dir(path).unwrap());
    std::fs::write(other.join("disk"), vec![0; 1 << 20]).unwrap();
    let file = root.path().join("target.toml");
    let write = |uris: &[String]| {
        let namespaces: String =
            uris.iter().map(|uri| format!("[[subsystem.namespace]]\nuri = \"{uri}\"\n")).collect();
        let text = format!(
            "[[listener]]\naddress = \"127.0.0.1:0\"\n[[subsystem]]\nnqn = \"{NQN}\"\n\
             allow-any-host = true\n{namespaces}"
        );
        // At once: it may be read just now.
        std::fs::write(file.with_extension("new"), text).unwrap();
        std::fs::rename(file.with_extension("new"), &file).unwrap();
    };
    let first = format!("file:{}/a?size=1m", disks.display());
    write(std::slice::from_ref(&first));
    let log = root.path().join("log");
    let start = |more: &str| {
        ServeProcess::start_shell_line(&format!(
            "{TENMIL} serve --config '{}' {more} 2>'{}'",
            file.display(),
            log.display()
        ))
    };
    let reload = |served: &ServeProcess, expected: &str| {
        run("kill", &["-HUP", &served.pid().to_string()]);
        for _ in 0..100 {
            let text = std::fs::read_to_string(&log).unwrap();
            if text.contains(expected) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("{expected}: {}", std::fs::read_to_string(&log).unwrap());
    };
    let served = start(&format!("--sandbox-path '{}'", disks.display()));
    let beside = format!("file:{}/b?size=1m", disks.display());
    write(&[first.clone(), beside.clone()]);
    reload(&served, "namespace 2");
    assert_eq!(std::fs::metadata(disks.join("b")).unwrap().len(), 1 << 20);
    if !restricts_everything(&served.rights_after_drop()) {
        return;
    }
    let elsewhere = format!("file:{}/disk", other.display());
    write(&[first.clone(), beside, elsewhere.clone()]);
    reload(&served, "--sandbox-path");
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(text.contains("permission denied by the sandbox of this process"), "{text}");
    served.rights_after_drop();
    assert_eq!(served.stop_with_sigterm(), Some(0));
    // Without the option any directory but those of the system.
    write(std::slice::from_ref(&first));
    let served = start("");
    write(&[first.clone(), elsewhere]);
    reload(&served, "namespace 2");
    let report = served.rights_after_drop();
    let opens = |path: &str| {
        let rules = report["paths"].as_array().unwrap().iter();
        rules.clone().any(|rule| rule["access"] == "read-write" && rule["path"] == path)
    };
    assert!(opens("/dev") && !opens("/etc") && !opens("/usr") && !opens("/"), "{report}");
}

/// The keyring lies neither below a directory that is open for devices nor beside the configuration file.
#[test]
fn reload_reads_the_keys_of_the_keyring() {
    let root = tempfile::tempdir().unwrap();
    let [configuration, keyring, disks] =
        ["configuration", "keys", "disks"].map(|name| root.path().join(name));
    for directory in [&configuration, &disks] {
        std::fs::create_dir(directory).unwrap();
    }
    let file = configuration.join("target.toml");
    let write = |names: &str| {
        let text = format!(
            "keyring = \"{}\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n[[subsystem]]\nnqn = \
             \"{NQN}\"\nallowed-hosts = [{{ nqn = \"nqn.2026-01.org.tenmil:host\", dhchap = \
             [{names}] }}]\n[[subsystem.namespace]]\nuri = \"file:{}/a?size=1m\"\n",
            keyring.display(),
            disks.display()
        );
        std::fs::write(&file, text).unwrap();
    };
    let generate = |name: &str| {
        let keyring = keyring.to_str().unwrap();
        let words = ["key", "generate", "dhchap", name, "--keyring", keyring];
        let output = Command::new(TENMIL).args(words).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    generate("old");
    write("\"old\"");
    let served = ServeProcess::start_shell_line(&format!(
        "{TENMIL} serve --config '{}' --sandbox=on --sandbox-path '{}'",
        file.display(),
        disks.display()
    ));
    let report = served.rights_after_drop();
    generate("new");
    write("\"old\", \"new\"");
    served.stdout_of_rpc_command("set configuration reload=true");
    let hosts = served.stdout_of_rpc_command("get hosts --json");
    let hosts: Value = serde_json::from_str(&hosts).unwrap();
    let named = hosts.as_array().unwrap().iter().find(|row| row["subsystem"] == NQN).unwrap();
    assert_eq!(named["dhchap"], json!(["old", "new"]));
    if restricts_everything(&report) {
        let rules = report["paths"].as_array().unwrap();
        let rule = json!({ "path": keyring.canonicalize().unwrap(), "access": "read" });
        assert!(rules.contains(&rule), "{report}");
    }
    assert_eq!(served.stop_with_sigterm(), Some(0));
}

#[test]
fn mode_off_drops_nothing_and_report_denies_nothing() {
    for (mode, seccomp, state) in [("off", "0", "off"), ("report", "2", "only reported")] {
        let root = tempfile::tempdir().unwrap();
        let served = CASES[0].start(root.path(), "", &format!("--sandbox={mode}"));
        (CASES[0].load)(&served, root.path());
        let text = served.stdout_of_rpc_command("get sandbox --json");
        let report: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&report["seccomp"], &report["landlock"]), (&state.into(), &state.into()));
        for status in threads_of(served.pid()) {
            let expected = format!("Seccomp:\t{seccomp}");
            assert!(status.contains("iou-") || status.contains(&expected), "{mode}: {status}");
        }
        assert_eq!(served.stop_with_sigterm(), Some(0));
    }
}

#[test]
fn server_runs_as_the_user_of_its_option() {
    let refused = Command::new(TENMIL)
        .args(["serve", "ram:1m", "-l", "nbd:/nonexistent/socket", "--user", "no-such-user"])
        .output()
        .unwrap();
    let text = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(text.contains("found no user `no-such-user`"), "{text}");
    if std::fs::metadata("/proc/self").unwrap().uid() != 0 {
        println!("skipped: only root can switch to another user");
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let open = |path: &Path| {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777))
    };
    open(root.path()).unwrap();
    let run_directory = root.path().join("run");
    std::fs::create_dir(&run_directory).unwrap();
    std::os::unix::fs::chown(&run_directory, Some(65534), Some(65534)).unwrap();
    let words = CASES[0].words.replace("DIR", root.path().to_str().unwrap());
    let served = ServeProcess::start_shell_line(&format!(
        "env XDG_RUNTIME_DIR='{}' {TENMIL} serve {words} --user 65534:65534",
        run_directory.display()
    ));
    let address = served.ready.split_whitespace().find(|word| word.starts_with("tcp://")).unwrap();
    verify(&served, &format!("{address}/{NQN}/1"));
    for status in threads_of(served.pid()).iter().filter(|status| !status.contains("iou-")) {
        for expected in ["Uid:\t65534\t65534\t65534\t65534", "Seccomp:\t2"] {
            assert!(status.contains(expected), "{expected}: {status}");
        }
        let has_no_root_group = status.lines().any(|line| {
            line.starts_with("Groups:") && !line.split_whitespace().any(|group| group == "0")
        });
        assert!(has_no_root_group, "{status}");
    }
    for name in ["disk", "state"] {
        assert_eq!(std::fs::metadata(root.path().join(name)).unwrap().uid(), 65534, "{name}");
    }
    let socket = run_directory.join(format!("tenmil/{}.sock", served.pid()));
    assert_eq!(std::fs::metadata(socket).unwrap().uid(), 65534);
    assert_eq!(served.stop_with_sigterm(), Some(0));
}

/// Words of the server that [`exec_on_a_lesser_kernel`] executes, and calls that its kernel lacks.
const LACKS: &str = "TENMIL_TEST_LACKS";
const SERVE: &str = "TENMIL_TEST_SERVE";

/// Not a test of its own: the program of the next one, which becomes a server.
#[test]
fn exec_on_a_lesser_kernel() {
    let (Ok(lacks), Ok(line)) = (std::env::var(LACKS), std::env::var(SERVE)) else { return };
    let numbers: Vec<_> = lacks.split(',').map(|number| number.parse().unwrap()).collect();
    simulate_missing_calls(&numbers).unwrap();
    panic!("{}", Command::new("sh").args(["-c", &line]).exec());
}

#[test]
fn kernel_without_landlock_or_seccomp_is_reported_and_the_rest_is_dropped() {
    let seccomp = if cfg!(target_arch = "x86_64") { "317" } else { "277" };
    let landlock = "444,445,446";
    let both = format!("{landlock},{seccomp}");
    let cases = [
        (landlock, vec!["Landlock"]),
        (seccomp, vec!["seccomp"]),
        (&both, vec!["Landlock", "seccomp"]),
    ];
    for (lacks, expected) in cases {
        let root = tempfile::tempdir().unwrap();
        let (log, ready) = (root.path().join("log"), root.path().join("ready"));
        let line = format!(
            "exec {TENMIL} serve ram:32m -l tcp://127.0.0.1:0 >'{}' 2>'{}'",
            ready.display(),
            log.display()
        );
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "sandbox::exec_on_a_lesser_kernel", "--nocapture"])
            .env(LACKS, lacks)
            .env(SERVE, &line)
            .env("XDG_RUNTIME_DIR", root.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let is_ready = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(50));
            std::fs::read_to_string(&ready).is_ok_and(|text| text.ends_with('\n'))
        });
        let log = std::fs::read_to_string(&log).unwrap_or_default();
        assert!(is_ready, "{lacks}: {log}");
        let query = Command::new(TENMIL)
            .args(["get", "sandbox", "--json"])
            .env("XDG_RUNTIME_DIR", root.path())
            .output()
            .unwrap();
        let report: Value = serde_json::from_slice(&query.stdout).unwrap();
        let status = threads_of(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        let obstacles = report["obstacles"].as_array().unwrap();
        let named: Vec<_> = obstacles
            .iter()
            .map(|text| text.as_str().unwrap().split(':').next().unwrap())
            .collect();
        assert_eq!(named, expected, "{report}");
        for name in expected {
            assert!(log.contains(&format!("sandbox: not available: {name}")), "{log}");
        }
        assert_eq!(
            (&report["capabilities"], &report["no_new_privs"]),
            (&json!("in force"), &json!("in force"))
        );
        let is_reduced = |status: &String| {
            ["CapEff:\t0000000000000000", "CapEff:\t0000000000004000"]
                .iter()
                .any(|line| status.contains(line))
        };
        assert!(status.iter().all(is_reduced), "{status:?}");
    }
}
