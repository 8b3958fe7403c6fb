//! Asking a process that runs: the client as a program, the server in this process, and once the
//! other way round. Every wait has a limit, and every directory is the test's own.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::Value;
use tenmil_linux::runtime_directory::RuntimeDirectory;
use tenmil_rpc::{Event, EventKind, ProcessParts, ProgramInfo, RpcServer, TABLE, event_channel};

/// A runtime directory of our own, as `TENMIL_RUNTIME_DIR` names it.
struct TestRuntimeDirectory {
    root: tempfile::TempDir,
    directory: RuntimeDirectory,
}

impl TestRuntimeDirectory {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let directory = RuntimeDirectory::at_path(root.path().join("tenmil")).unwrap();
        Self { root, directory }
    }

    fn serve(&self, pid: u32) -> RpcServer {
        let (_announcer, announced) = event_channel().unwrap();
        let state = ProcessParts::new().with_part(ProgramInfo { version: "9.9.9", log: None });
        RpcServer::start(&self.directory, pid, &TABLE, state, announced).unwrap()
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command.args(line.split_whitespace()).env("TENMIL_RUNTIME_DIR", self.directory.path());
        command
    }

    fn run(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }

    /// A command that runs on, once it listens. Its standard output is silent meanwhile.
    fn start_until_listening(&self, line: &str) -> RunningCommand {
        let run = RunningCommand::start(&mut self.command(line));
        let begun = (0..6_000).any(|_| {
            let waited = run.lines.recv_timeout(Duration::from_millis(10));
            assert!(waited.is_err(), "{waited:?}");
            self.directory.listening_processes().unwrap() == [run.child.id()]
        });
        assert!(begun, "it never listens");
        run
    }

    /// What a command that succeeds prints.
    fn stdout_of_success(&self, line: &str) -> String {
        let output = self.run(line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{line}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// What a command that is refused says.
    fn stderr_of_usage_error(&self, line: &str) -> String {
        let output = self.run(line);
        assert_eq!(output.status.code(), Some(2), "{line}");
        assert_eq!(output.stdout, b"", "{line}");
        String::from_utf8(output.stderr).unwrap()
    }
}

#[test]
fn only_running_process_is_queried_by_default() {
    let world = TestRuntimeDirectory::new();
    let _server = world.serve(std::process::id());
    let text = world.stdout_of_success("get process");
    assert!(text.starts_with("version") && text.contains("9.9.9"), "{text}");
    let json: Value = serde_json::from_str(&world.stdout_of_success("get process --json")).unwrap();
    assert_eq!(json["pid"], std::process::id());
    assert!(json["uptime_ns"].as_u64() > Some(0));
    let pid = std::process::id();
    assert!(world.stdout_of_success(&format!("get environment --pid {pid}")).contains("kernel"));
    assert!(world.stdout_of_success("get methods").contains("environment"));
}

#[test]
fn none_or_several_processes_are_rejected_by_exit_code_and_listed() {
    let world = TestRuntimeDirectory::new();
    let none = world.stderr_of_usage_error("get process");
    assert!(none.starts_with("error: no tenmil process of this user runs, expected one\nhint: "));
    let _servers = [world.serve(std::process::id()), world.serve(u32::MAX)];
    let several = world.stderr_of_usage_error("get process");
    assert!(several.starts_with("error: 2 tenmil processes run, expected --pid with one of "));
    assert!(several.contains(&format!("{} (", std::process::id())), "{several}");
    assert!(world.stdout_of_success("get process --pid 4294967295").contains("9.9.9"));
    assert!(world.stderr_of_usage_error("get process --pid 1").contains("--pid 1: "));
}

#[test]
fn process_is_found_by_its_name_and_by_its_socket() {
    let world = TestRuntimeDirectory::new();
    let socket = world.root.path().join("control");
    let shown = socket.display();
    let line = format!("perf emu:null -q 1 -t 600 --instance db --control {shown}");
    let run = world.start_until_listening(&line);
    let pid = run.child.id();
    for selector in ["--instance db".to_owned(), format!("--control {shown}"), String::new()] {
        let line = format!("get process --json {selector}");
        let json: Value = serde_json::from_str(&world.stdout_of_success(&line)).unwrap();
        assert_eq!(json["pid"], pid, "{selector}");
    }
    let by_variable = world.command("get process --json").env("TENMIL_CONTROL", &socket).output();
    assert!(by_variable.unwrap().status.success());
    let listed: Value = serde_json::from_str(&world.stdout_of_success("list --json")).unwrap();
    assert_eq!(listed["processes"][0]["instance"], "db");
    let refused = world.stderr_of_usage_error("get process --instance other");
    assert!(refused.starts_with("error: --instance other: it is no tenmil process"), "{refused}");
    assert!(refused.contains("(db: "), "{refused}");
    let refused = world.stderr_of_usage_error(&format!("perf emu:null -t 600 --control {shown}"));
    assert!(refused.contains("in use by another process"), "{refused}");
    let refused = world.stderr_of_usage_error("perf emu:null --control-listen 0.0.0.0:1");
    assert!(refused.contains("can be reached from other machines"), "{refused}");
    drop(run);
    let refused = world.run(&format!("get process --control {shown}"));
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(text.contains("no process listens there"), "{text}");
}

#[test]
fn mistyped_method_is_reported_without_a_process() {
    let world = TestRuntimeDirectory::new();
    for (line, error) in [
        ("get proces", "no get method `proces`, expected "),
        ("get process name=a", "get process: no parameter `name`, expected none"),
        ("get process now", "get process: `now` has no `=`, expected NAME=VALUE"),
        ("set process", "no set method `process`, expected "),
        ("set", "<NAME> is missing, expected as shown by --help"),
        ("get --markdown process", "--markdown and "),
        ("events --count many", "--count: `many` is not a count"),
    ] {
        let text = world.stderr_of_usage_error(line);
        assert!(text.starts_with(&format!("error: {error}")), "{line}: {text}");
    }
    assert!(world.stderr_of_usage_error("get proces").contains("hint: did you mean `process`?"));
    let listed = world.stdout_of_success("get");
    assert!(listed.contains("tenmil get process") && listed.contains("tenmil events"), "{listed}");
    assert!(world.stdout_of_success("get --markdown").starts_with("# RPC methods and events"));
}

#[test]
fn socket_of_a_dead_process_is_removed() {
    let world = TestRuntimeDirectory::new();
    let path = world.directory.socket_of(12);
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(
        world.stderr_of_usage_error("get process").contains("no tenmil process of this user runs")
    );
    assert!(!path.exists());
}

#[test]
fn runtime_directory_accessible_to_others_is_rejected() {
    use std::os::unix::fs::PermissionsExt;
    let world = TestRuntimeDirectory::new();
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(world.directory.path(), open).unwrap();
    let output = world.run("get process");
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("mode is 0755, expected 0700"), "{text}");
}

#[test]
fn events_are_printed_up_to_the_requested_number() {
    const BELL: EventKind = EventKind { name: "bell", help: "the bell rang" };
    let world = TestRuntimeDirectory::new();
    let (announcer, announced) = event_channel().unwrap();
    let _server =
        RpcServer::start(&world.directory, 7, &TABLE, ProcessParts::new(), announced).unwrap();
    let mut follower = RunningCommand::start(&mut world.command("events --json --count 1"));
    // It subscribes at an unknown moment, so the event is emitted until one is received.
    let line = (0..6_000).find_map(|_| {
        let about = serde_json::json!({});
        announcer.emit(Event { kind: BELL, text: "ding".into(), about });
        follower.lines.recv_timeout(Duration::from_millis(10)).ok()
    });
    let event: Value = serde_json::from_str(&line.expect("it hears")).unwrap();
    assert_eq!((&event["kind"], &event["text"]), (&"bell".into(), &"ding".into()));
    assert_eq!(follower.child.wait().unwrap().code(), Some(0));
    assert_eq!(follower.lines.recv().ok(), None, "one was enough");
}

#[test]
fn running_perf_can_be_queried_and_a_killed_one_is_gone() {
    let world = TestRuntimeDirectory::new();
    let mut run = world.start_until_listening("perf emu:null -q 1 -t 600");
    let pid = run.child.id();
    let json: Value = serde_json::from_str(&world.stdout_of_success("get process --json")).unwrap();
    assert_eq!(
        (json["pid"].as_u64(), &json["command_line"][1]),
        (Some(pid.into()), &"perf".into())
    );
    run.child.kill().unwrap();
    run.child.wait().unwrap();
    assert!(world.directory.socket_of(pid).exists(), "it had no time to tidy up");
    assert!(
        world.stderr_of_usage_error("get process").contains("no tenmil process of this user runs")
    );
    assert!(!world.directory.socket_of(pid).exists());
}

#[test]
fn scheduler_of_a_run_is_configured_before_and_during_it() {
    let world = TestRuntimeDirectory::new();
    let run =
        world.start_until_listening("perf emu:null -q 1 -t 600 --rate 100 --scheduler dynamic");
    let reported =
        |line: &str| -> Value { serde_json::from_str(&world.stdout_of_success(line)).unwrap() };
    // It listens before its reactors have begun.
    let balances = (0..1_000).any(|_| world.run("get scheduler").status.success());
    assert!(balances, "it never balances");
    let before = reported("get scheduler --json");
    assert_eq!(before["policy"], "dynamic");
    let after = reported("set scheduler policy=static load_limit=10 period_ms=20 --json");
    let (policy, limit) = (&after["policy"], &after["load_limit_percent"]);
    assert_eq!((policy, limit), (&"static".into(), &10.into()));
    assert_eq!(after["core_limit_percent"], before["core_limit_percent"]);
    let refused = world.stderr_of_usage_error("set scheduler load_limit=99");
    assert!(refused.contains("load limit 99 %"), "{refused}");
    assert_eq!(reported("get scheduler --json"), after);
    let threads = reported("get threads --json");
    let names: Vec<&Value> = threads.as_array().unwrap().iter().map(|it| &it["name"]).collect();
    assert_eq!(names, ["balancer", "submit-0"]);
    drop(run);
}

#[test]
fn missing_cpufreq_is_reported_in_one_line() {
    let world = TestRuntimeDirectory::new();
    let output = world.run("perf emu:null -q 1 -t 0.05 -a 0 --ram --governor --json");
    assert_eq!(output.status.code(), Some(0));
    let said = String::from_utf8(output.stderr).unwrap();
    let cpufreq = std::path::Path::new("/sys/devices/system/cpu/cpu0/cpufreq").exists();
    let notes = said.matches("note: frequency scaling is unchanged: ").count();
    assert_eq!(notes, usize::from(!cpufreq), "{said}");
}

/// A program that runs, and the lines it prints. Killed if the test ends before it.
struct RunningCommand {
    child: Child,
    lines: Receiver<String>,
    /// It ends when the program does.
    _reader: tenmil_linux::NamedThread<()>,
}

impl RunningCommand {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (send, lines) = channel();
        let read = move |_: &tenmil_linux::StopFlag| {
            output.lines().map_while(Result::ok).try_for_each(|line| send.send(line)).ok();
        };
        let reader = tenmil_linux::NamedThread::spawn("reader", None, read).unwrap();
        Self { child, lines, _reader: reader }
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        // One that has ended already cannot be killed, and need not be.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
