//! A process that has dropped its rights stays so, and all of its threads have: this test is a program
//! that starts itself as a child for each case, without a test harness.

#![allow(clippy::disallowed_methods, reason = "it tries what the process may no longer do")]

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tenmil_linux::sandbox::{
    AllowedCalls, CallGroup, CapabilitySet, Measure, NetworkRules, PathAccess, PathRule,
    SandboxPlan, ServiceUser, SocketFamilies, denial_of_path, denied_calls, new_denied_calls,
    report, restrict, simulate_missing_calls, switch_user, thread_capabilities,
};
use tenmil_linux::{NamedThread, StopFlag};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["threads"] => every_thread_has_dropped_its_rights(),
        ["calls"] => denied_calls_fail_and_are_counted(),
        ["paths", directory] => only_permitted_paths_can_be_opened(Path::new(directory)),
        ["ports"] => ports_are_closed(),
        ["exec"] => executing_a_program_ends_the_process(),
        ["report"] => report_denies_nothing(),
        ["user"] => every_thread_runs_as_another_user(),
        ["probe"] => print!("{}", restrict(&plan(&[])).obstacles().join("; ")),
        ["cost"] => measure_cost_of_filter(),
        ["time-calls", filter] => time_calls(filter),
        ["without", missing @ ..] => run_without(missing),
        ["degraded", missing @ ..] => what_the_kernel_lacks_is_reported(missing),
        _ => run_all(),
    }
}

fn run_all() {
    let probe = run_child(&["probe"]);
    let obstacles = String::from_utf8_lossy(&probe.stdout).into_owned();
    if !obstacles.is_empty() {
        println!("sandbox: skipped: {obstacles}");
        return;
    }
    let root = tempfile::tempdir().expect("a directory");
    let directory = root.path().to_str().expect("a path");
    for case in [&["threads"][..], &["calls"], &["paths", directory], &["ports"], &["report"]] {
        expect_success(case);
    }
    let ended = run_child(&["exec"]);
    assert_eq!(ended.status.signal(), Some(31), "SIGSYS: {ended:?}");
    match rustix::process::geteuid().is_root() {
        true => expect_success(&["user"]),
        false => println!("sandbox: switching users is skipped, it needs root"),
    }
    for missing in [&["landlock"][..], &["seccomp"], &["landlock", "seccomp"]] {
        expect_success(&[&["without"], missing].concat());
    }
    println!("sandbox: all threads drop capabilities, paths, ports and system calls");
}

/// Prints the time of a system call without and with the filter, for a call that is allowed whatever its
/// arguments, and for one whose arguments are checked: medians of processes that alternate.
fn measure_cost_of_filter() {
    const ROUNDS: usize = 101;
    let mut times = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS {
        for (filter, at) in [("without", 0), ("with", 2)] {
            let output =
                String::from_utf8(run_child(&["time-calls", filter]).stdout).expect("text");
            for (index, word) in output.split_whitespace().enumerate() {
                times[at + index].push(word.parse::<f64>().expect("a number"));
            }
        }
    }
    let [plain, plain_checked, filtered, filtered_checked] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        (times[ROUNDS / 2], times[ROUNDS / 4], times[ROUNDS * 3 / 4])
    });
    let line = |what: &str, (before, ..): (f64, f64, f64), after: (f64, f64, f64)| {
        println!(
            "{what}: {before:.1} ns without the filter, {:.1} ns ({:.1}-{:.1}) with it",
            after.0, after.1, after.2
        );
    };
    line("getppid", plain, filtered);
    line("prlimit64, arguments checked", plain_checked, filtered_checked);
}

/// Prints the shortest of ten averages, in nanoseconds, for each of two calls.
fn time_calls(filter: &str) {
    if filter == "with" {
        restrict(&plan(&[]));
    }
    let shortest = |call: &dyn Fn()| {
        const CALLS: u32 = 4000;
        let times = (0..10).map(|_| {
            let start = std::time::Instant::now();
            (0..CALLS).for_each(|_| call());
            start.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
        });
        times.fold(f64::INFINITY, f64::min)
    };
    let plain = shortest(&|| {
        let _ = rustix::process::getppid();
    });
    let checked = shortest(&|| {
        let _ = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    });
    println!("{plain} {checked}");
}

fn run_child(words: &[&str]) -> Output {
    let program = std::env::current_exe().expect("this program");
    Command::new(program).args(words).output().expect("it starts")
}

fn expect_success(words: &[&str]) {
    let output = run_child(words);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{words:?}: {} {}", output.status, text(&output.stderr));
}

fn plan(paths: &[(&Path, PathAccess)]) -> SandboxPlan {
    let rule =
        |(path, access): &(&Path, PathAccess)| PathRule { path: path.into(), access: *access };
    let mut rules: Vec<PathRule> = paths.iter().map(rule).collect();
    rules.push(PathRule { path: "/proc".into(), access: PathAccess::Read });
    SandboxPlan {
        calls: AllowedCalls {
            groups: CallGroup::ALL.to_vec(),
            families: SocketFamilies { inet: true, netlink: true },
        },
        kept: CapabilitySet::NET_ADMIN,
        paths: rules,
        network: NetworkRules { denies_bind: true, denies_connect: true },
        only_reports: false,
    }
}

/// Values of a line in the status of each thread.
fn status_of_threads(key: &str) -> Vec<String> {
    let threads = std::fs::read_dir("/proc/self/task").expect("threads");
    let value = |thread: std::fs::DirEntry| {
        let status = std::fs::read_to_string(thread.path().join("status")).expect("a status");
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        line.expect("the key").trim().to_owned()
    };
    threads.map(|thread| value(thread.expect("a thread"))).collect()
}

fn assert_all(key: &str, expected: &str) {
    let found = status_of_threads(key);
    assert!(found.len() >= 3, "{found:?}");
    assert!(found.iter().all(|value| value == expected), "{key} {found:?}, expected {expected}");
}

fn sleep_until_stopped(stop: &StopFlag) {
    while !stop.is_stopped() {
        std::thread::park_timeout(std::time::Duration::from_millis(5));
    }
}

fn compute_until_stopped(stop: &StopFlag) {
    while !stop.is_stopped() {
        std::hint::spin_loop();
    }
}

fn every_thread_has_dropped_its_rights() {
    let before = thread_capabilities().expect("capabilities");
    let cannot_open = || std::fs::File::open("/etc/passwd").is_err();
    let sleeps = NamedThread::spawn("sleeps", None, move |stop| {
        sleep_until_stopped(stop);
        cannot_open()
    });
    let computes = NamedThread::spawn("computes", None, move |stop| {
        compute_until_stopped(stop);
        cannot_open()
    });
    let report = restrict(&plan(&[]));
    assert_eq!(report.obstacles(), [""; 0]);
    assert_eq!(report.threads, 3);
    let kept = before.permitted.intersection(CapabilitySet::NET_ADMIN);
    assert_eq!(report.capabilities, kept);
    let shown = format!("{:016x}", kept.0);
    for key in ["CapEff:", "CapPrm:"] {
        assert_all(key, &shown);
    }
    for key in ["CapInh:", "CapAmb:"] {
        assert_all(key, "0000000000000000");
    }
    if before.effective.contains(CapabilitySet::SETPCAP) {
        assert_all("CapBnd:", &shown);
        assert_eq!(report.bounding_set, Measure::InForce);
    }
    assert_all("NoNewPrivs:", "1");
    assert_all("Seccomp:", "2");
    // Threads that start later inherit all of it.
    let later = NamedThread::spawn("later", None, move |_| cannot_open());
    assert!(later.expect("a thread").join());
    // The kernel does not show Landlock in the status of a thread.
    for thread in [sleeps, computes] {
        assert!(thread.expect("a thread").stop());
    }
}

fn denied_calls_fail_and_are_counted() {
    restrict(&plan(&[]));
    assert_eq!(denied_calls(), []);
    for _ in 0..3 {
        // Neither a call of the list, nor one of those that end the process.
        let refused = rustix::process::getpgid(None).map(drop);
        assert_eq!(refused, Err(rustix::io::Errno::PERM));
    }
    let packet = rustix::net::AddressFamily::from_raw(17);
    let refused = rustix::net::socket(packet, rustix::net::SocketType::RAW, None);
    assert_eq!(refused.expect_err("a packet socket"), rustix::io::Errno::PERM);
    let denied = new_denied_calls();
    let counts: Vec<u32> = denied.iter().map(|one| one.count).collect();
    assert_eq!(counts.iter().sum::<u32>(), 4, "{denied:?}");
    assert!(denied.iter().any(|one| one.name == "socket" && one.count == 1), "{denied:?}");
    assert_eq!(new_denied_calls(), []);
    assert_eq!(denied_calls(), denied);
    // What is allowed works: a thread, memory, a file descriptor, time.
    let works = NamedThread::spawn("works", None, |_| vec![1_u8; 64 << 20].len());
    assert_eq!(works.expect("a thread").join(), 64 << 20);
    assert!(TcpListener::bind("127.0.0.1:0").is_err(), "the plan denies it");
}

fn only_permitted_paths_can_be_opened(root: &Path) {
    let path = |name: &str| root.join(name);
    std::fs::create_dir(path("disks")).expect("a directory");
    std::fs::create_dir(path("sockets")).expect("a directory");
    for name in ["disks/a", "read", "outside", "sockets/file"] {
        std::fs::write(path(name), "x").expect("a file");
    }
    let open_before = std::fs::File::options().write(true).open(path("outside")).expect("a file");
    let (disks, read, sockets) = (path("disks"), path("read"), path("sockets"));
    let report = restrict(&plan(&[
        (&disks, PathAccess::ReadWrite),
        (&read, PathAccess::Read),
        (&sockets, PathAccess::Remove),
        (Path::new("/no/such/path"), PathAccess::Read),
    ]));
    assert_eq!(report.landlock, Measure::InForce);
    assert_eq!(report.paths.len(), 4, "without the missing one: {:?}", report.paths);
    let writes = |path: PathBuf| std::fs::File::options().write(true).open(path).map(drop);
    let denied = |result: std::io::Result<()>| {
        result.expect_err("denied").kind() == std::io::ErrorKind::PermissionDenied
    };
    assert!(writes(path("disks/a")).is_ok() && std::fs::write(path("disks/new"), "x").is_ok());
    std::fs::rename(path("disks/new"), path("disks/b")).expect("within a permitted directory");
    std::fs::remove_file(path("disks/b")).expect("within a permitted directory");
    assert!(std::fs::read(&read).is_ok() && denied(writes(read.clone())));
    assert!(denied(writes(path("outside"))) && denied(std::fs::read(path("outside")).map(drop)));
    assert!(denied(std::fs::write(path("created"), "x")));
    assert!(denied(std::fs::read("/etc/passwd").map(drop)));
    assert!(denied(std::fs::read(path("sockets/file")).map(drop)));
    std::fs::remove_file(path("sockets/file")).expect("it may be removed");
    assert!(denied(std::fs::create_dir(path("disks/directory"))));
    // What is open stays usable.
    (&open_before).write_all(b"y").expect("it is open");
    let why = denial_of_path(&path("outside"), true).expect("a reason");
    assert_eq!(why, "permission denied by the sandbox of this process");
    assert!(denial_of_path(&path("read"), true).is_some());
    assert!(UnixListener::bind(path("sockets/new")).is_err());
}

fn ports_are_closed() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let report = restrict(&plan(&[]));
    let checks_ports = report.landlock_abi >= Some(4);
    assert_eq!(report.network.denies_connect, checks_ports);
    if checks_ports {
        let kind = std::io::ErrorKind::PermissionDenied;
        assert_eq!(TcpStream::connect(address).expect_err("denied").kind(), kind);
        assert_eq!(TcpListener::bind("127.0.0.1:0").expect_err("denied").kind(), kind);
    }
}

fn executing_a_program_ends_the_process() {
    restrict(&plan(&[]));
    let refused = Command::new("/bin/true").exec();
    unreachable!("it is not executed: {refused}");
}

fn report_denies_nothing() {
    let before = thread_capabilities().expect("capabilities");
    let report = restrict(&SandboxPlan { only_reports: true, ..plan(&[]) });
    assert_eq!(
        (&report.seccomp, &report.landlock),
        (&Measure::OnlyReported, &Measure::OnlyReported)
    );
    assert_eq!(thread_capabilities().expect("capabilities").permitted, before.permitted);
    assert!(std::fs::read("/etc/passwd").is_ok() && TcpListener::bind("127.0.0.1:0").is_ok());
    assert!(rustix::process::getpgid(None).map(drop).is_ok());
    assert!(Command::new("/bin/true").status().expect("it is executed").success());
}

fn every_thread_runs_as_another_user() {
    let user = ServiceUser::find("65534:65534").or_else(|_| ServiceUser::find("nobody"));
    let user = user.expect("every system has the user `nobody`");
    let sleeps = NamedThread::spawn("sleeps", None, sleep_until_stopped);
    let computes = NamedThread::spawn("computes", None, compute_until_stopped);
    let own_file = std::fs::File::open("/etc/passwd").expect("a file");
    switch_user(&user, CapabilitySet::NET_ADMIN).expect("root may");
    let four = |id: u32| format!("{id}\t{id}\t{id}\t{id}");
    assert_all("Uid:", &four(user.uid));
    assert_all("Gid:", &four(user.gid));
    assert_all("CapEff:", &format!("{:016x}", CapabilitySet::NET_ADMIN.0));
    let groups: Vec<String> = user.groups.iter().map(u32::to_string).collect();
    assert_all("Groups:", &groups.join(" "));
    assert!(switch_user(&ServiceUser::find("root").expect("root"), CapabilitySet::NONE).is_err());
    let report = restrict(&plan(&[]));
    assert_eq!(report.obstacles(), [""; 0]);
    assert_all("CapEff:", &format!("{:016x}", CapabilitySet::NET_ADMIN.0));
    drop(own_file);
    for thread in [sleeps, computes] {
        thread.expect("a thread").stop();
    }
}

/// Executes this program again, on a kernel that seems to lack these.
fn run_without(missing: &[&str]) {
    let mut numbers = Vec::new();
    for what in missing {
        numbers.extend(match *what {
            "landlock" => [444, 445, 446].to_vec(),
            _ => vec![libc_seccomp_number()],
        });
    }
    simulate_missing_calls(&numbers).expect("a filter");
    let program = std::env::current_exe().expect("this program");
    let error = Command::new(program).arg("degraded").args(missing).exec();
    unreachable!("{error}");
}

const fn libc_seccomp_number() -> std::ffi::c_long {
    if cfg!(target_arch = "x86_64") { 317 } else { 277 }
}

fn what_the_kernel_lacks_is_reported(missing: &[&str]) {
    let sleeps = NamedThread::spawn("sleeps", None, sleep_until_stopped);
    let computes = NamedThread::spawn("computes", None, compute_until_stopped);
    let taken = restrict(&plan(&[]));
    let lacks = |what: &str| missing.contains(&what);
    assert_eq!(taken.landlock.obstacle().is_some(), lacks("landlock"), "{taken:?}");
    assert_eq!(taken.seccomp.obstacle().is_some(), lacks("seccomp"), "{taken:?}");
    assert_eq!(taken.obstacles().len(), missing.len());
    if lacks("landlock") {
        let why = taken.landlock.obstacle().expect("a reason");
        assert!(why.contains("expected Linux 5.13 or later"), "{why}");
        assert!(std::fs::read("/etc/passwd").is_ok(), "not restricted");
    }
    // The rest is in force.
    assert_all("NoNewPrivs:", "1");
    let kept = report().expect("a report").capabilities;
    assert_all("CapEff:", &format!("{:016x}", kept.0));
    for thread in [sleeps, computes] {
        thread.expect("a thread").stop();
    }
}
