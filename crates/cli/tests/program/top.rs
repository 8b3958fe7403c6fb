//! `tenmil top` as a program, over reactors in this process. Every wait has a limit, and every
//! directory is the test's own.

use std::process::{Child, Command, Output};

use crate::terminal::{Terminal, await_exit};
use serde_json::Value;
use tenmil_base::Span;
use tenmil_linux::runtime_directory::RuntimeDirectory;
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::{Context, PollResult, Poller, PollerBuilder, ReactorOptions, ThreadBuilder};
use tenmil_rpc::{ProcessParts, ProgramInfo, ReactorsSource, RpcServer, TABLE, event_channel};

/// A poller that finds work every time.
struct AlwaysBusyPoller;

impl Poller for AlwaysBusyPoller {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        PollResult::Busy
    }
}

/// Reactors that run and can be asked.
struct TopTest {
    root: tempfile::TempDir,
    directory: RuntimeDirectory,
    _reactors: tenmil_reactor::Reactors,
    _server: RpcServer,
}

impl TopTest {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let directory = RuntimeDirectory::at_path(root.path().join("tenmil")).unwrap();
        let cores: CpuList = CpuList::allowed_cpus().iter().take(1).collect();
        let options = ReactorOptions::default();
        let reactors =
            tenmil_reactor::Reactors::start_on_cores(&cores, &options, &Clock::on_kernel_clock())
                .unwrap();
        for name in ["heart", "\u{1b}[2Jlung"] {
            let beat =
                PollerBuilder::polled_each_period("beat", Span::from_ms(5), AlwaysBusyPoller);
            reactors.spawn(ThreadBuilder::new(name).add_poller(beat)).unwrap();
        }
        let running = tenmil_reactor::ReactorsHandle {
            directory: reactors.registry().clone(),
            clock: *reactors.clock(),
        };
        let state = ProcessParts::new()
            .with_part(ProgramInfo { version: "9.9.9", log: None })
            .with_part(ReactorsSource::new(move || Some(running.clone())));
        let (_announcer, announced) = event_channel().unwrap();
        let pid = std::process::id();
        let server = RpcServer::start(&directory, pid, &TABLE, state, announced).unwrap();
        Self { root, directory, _reactors: reactors, _server: server }
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command.args(line.split_whitespace()).env("TENMIL_RUNTIME_DIR", self.directory.path());
        command
    }

    fn run(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }

    fn stdout_of_success(&self, line: &str) -> String {
        let output = self.run(line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{line}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }
}

#[test]
fn one_sample_has_reactors_threads_and_pollers() {
    let world = TopTest::new();
    let sample: Value =
        serde_json::from_str(&world.stdout_of_success("top --json --interval 300ms")).unwrap();
    assert_eq!((&sample["process"]["version"], &sample["policy"]), (&"9.9.9".into(), &Value::Null));
    assert!(sample["interval_ns"].as_u64() >= Some(300_000_000));
    let reactors = sample["reactors"].as_array().unwrap();
    assert_eq!((reactors.len(), &reactors[0]["mode"]), (1, &"adaptive".into()));
    let rate = |value: &Value| value.as_f64().unwrap();
    assert!(rate(&reactors[0]["sleeps_per_second"]) > 0.0, "between two beats it sleeps: {sample}");
    assert_eq!(sample["sleeps_per_second"], reactors[0]["sleeps_per_second"]);
    assert!((0.0..100.0).contains(&rate(&sample["busy_percent"])));
    let names: Vec<_> =
        sample["threads"].as_array().unwrap().iter().map(|it| &it["name"]).collect();
    assert_eq!(names, ["heart", "\u{1b}[2Jlung"]);
    for poller in sample["pollers"].as_array().unwrap() {
        assert_eq!((&poller["name"], &poller["every_ns"]), (&"beat".into(), &5_000_000.into()));
        assert_eq!(poller["found_percent"], 100.0);
        // 200 if no other process used the processor.
        assert!((1.0..=250.0).contains(&rate(&poller["polls_per_second"])), "{poller}");
    }
    assert_eq!(sample["pollers"][1]["thread_id"], sample["threads"][1]["id"]);
}

#[test]
fn tables_are_printed_once_without_a_terminal() {
    let world = TopTest::new();
    for line in ["top --once -i 50ms", "top -i 50ms"] {
        let text = world.stdout_of_success(line);
        assert!(text.starts_with("tenmil 9.9.9  process "), "{text}");
        assert!(text.contains(" of 1 reactor ") && text.contains("  adaptive polling"), "{text}");
        assert!(text.contains("heart") && text.contains("every 5 ms"), "{text}");
        assert!(text.contains("\\u{1b}[2Jlung") && !text.contains('\u{1b}'), "{text}");
    }
}

#[test]
fn invalid_arguments_are_rejected_before_the_screen_is_drawn() {
    let world = TopTest::new();
    let refused = |line: &str| {
        let output = world.run(line);
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(2), &b""[..]), "{line}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(refused("top --interval 0").starts_with("error: -i: `0` is out of range, expected "));
    assert!(refused("top --once --pid 1").starts_with("error: --pid 1: it is no tenmil process"));
    let path = world.directory.socket_of(std::process::id());
    std::fs::remove_file(path).unwrap();
    assert!(refused("top --json").starts_with("error: no tenmil process of this user runs"));
}

fn signal(name: &str, child: &Child) {
    let line = format!("kill -{name} {}", child.id());
    assert!(Command::new("sh").args(["-c", &line]).status().unwrap().success());
}

/// Whether we, and so whatever we start, were told to go on when a terminal goes, as by `nohup`.
fn ignores_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(ignored.trim(), 16).unwrap() & 1 != 0
}

#[test]
fn terminal_is_restored_however_top_ends() {
    let world = TopTest::new();
    type End = fn(&Terminal, &Child);
    let ends: [(&str, End); 5] = [
        ("q", |terminal, _| terminal.send_keys("q")),
        ("ctrl-c", |terminal, _| terminal.send_keys("\u{3}")),
        ("SIGTERM", |_, child| signal("TERM", child)),
        ("SIGINT", |_, child| signal("INT", child)),
        ("SIGHUP", |_, child| signal("HUP", child)),
    ];
    for (what, end) in ends {
        if what == "SIGHUP" && ignores_hangups() {
            continue;
        }
        let mut terminal = Terminal::new();
        let mut child = terminal.run(world.command("top --interval 50ms"));
        terminal.await_raw();
        terminal.await_shown("heart");
        end(&terminal, &child);
        let (code, shown) = terminal.await_end(&mut child);
        assert_eq!(code, Some(0), "{what}: {shown}");
        terminal.assert_restored(&shown);
    }
}

#[test]
fn top_waits_for_another_process_after_one_exits() {
    let world = TopTest::new();
    let mut terminal = Terminal::new();
    let mut child = terminal.run(world.command("top --interval 50ms"));
    terminal.await_shown("heart");
    let TopTest { root, _server: server, .. } = world;
    drop(server);
    terminal.await_shown("GONE");
    assert!(child.try_wait().unwrap().is_none(), "it waits");
    terminal.send_keys("q");
    let (code, shown) = terminal.await_end(&mut child);
    assert_eq!(code, Some(0), "{shown}");
    terminal.assert_restored(&shown);
    drop(root);
}

#[test]
fn top_ends_when_its_terminal_closes() {
    let world = TopTest::new();
    let terminal = Terminal::new();
    let mut child = terminal.start_without_reading(world.command("top --interval 50ms"));
    terminal.await_raw();
    terminal.close();
    assert_ne!(await_exit(&mut child), Some(0), "it says that there is no terminal any more");
}

#[test]
fn nohup_is_respected() {
    let world = TopTest::new();
    let mut terminal = Terminal::new();
    let program = env!("CARGO_BIN_EXE_tenmil");
    let line = format!("trap '' HUP; exec {program} top --interval 50ms");
    let mut command = Command::new("sh");
    command.args(["-c", &line]).env("TENMIL_RUNTIME_DIR", world.directory.path());
    let mut child = terminal.run(command);
    terminal.await_raw();
    terminal.await_shown("heart");
    signal("HUP", &child);
    terminal.send_keys("?");
    terminal.await_shown("ctrl-c");
    terminal.send_keys("q");
    let (code, shown) = terminal.await_end(&mut child);
    assert_eq!(code, Some(0), "{shown}");
}
