//! Signals belong to a whole process, so this test is a program: it starts itself as a child and
//! sends signals to it, without a test harness.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tenmil_base::Span;
use tenmil_linux::signal::{
    is_stop_requested, limit_stop_time, request_reload_on_sighup,
    request_stop_on_sigint_or_sigterm, take_reload_request,
};

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("child") => return run_child(),
        Some("stuck") => return child_that_ignores_stop(),
        _ => {}
    }
    for signal in [Signal::INT, Signal::TERM] {
        first_signal_stops_in_order(signal);
        second_signal_exits_at_once(signal);
    }
    each_hangup_requests_one_reload_and_ends_nothing();
    stop_beyond_its_limit_exits_with_its_message(Stdio::piped());
    stop_beyond_its_limit_exits_although_stderr_is_not_read();
    println!("signals: the first ends a run in order, the second at once; SIGHUP is told");
}

/// Prints `ready`, prints `interrupted` when the flag is set, and ends when its input does.
fn run_child() {
    assert!(!is_stop_requested());
    request_stop_on_sigint_or_sigterm().expect("handlers can be installed");
    request_reload_on_sighup().expect("handlers can be installed");
    print_line("ready");
    while !is_stop_requested() {
        if take_reload_request() {
            print_line("reload");
        }
        std::thread::park_timeout(std::time::Duration::from_millis(1));
    }
    print_line("interrupted");
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
}

/// Never stops by itself, with a limit of 50 ms.
fn child_that_ignores_stop() {
    request_stop_on_sigint_or_sigterm().expect("handlers can be installed");
    limit_stop_time(Span::from_ms(50), "error: stuck\n".into(), 3)
        .expect("a handler can be installed");
    if std::env::args().nth(2).as_deref() == Some("full") {
        fill_standard_error();
    }
    print_line("ready");
    loop {
        std::thread::park();
    }
}

/// Fills the pipe of standard error without blocking, and makes it blocking again.
fn fill_standard_error() {
    let error = rustix::stdio::stderr();
    let flags = rustix::fs::fcntl_getfl(error).expect("it has flags");
    rustix::fs::fcntl_setfl(error, flags | rustix::fs::OFlags::NONBLOCK).expect("they can be set");
    while rustix::io::write(error, &[b'x'; 4096]).is_ok() {}
    while rustix::io::write(error, b"x").is_ok() {}
    rustix::fs::fcntl_setfl(error, flags).expect("they can be set");
}

fn print_line(word: &str) {
    println!("{word}");
    std::io::stdout().flush().expect("the parent listens");
}

fn first_signal_stops_in_order(signal: Signal) {
    let (mut child, mut heard) = start_child();
    send_signal(&child, signal);
    assert_eq!(read_line(&mut heard), "interrupted");
    drop(child.stdin.take());
    assert!(wait_for_exit(&mut child).success(), "it went on to its own end");
}

fn second_signal_exits_at_once(signal: Signal) {
    let (mut child, mut heard) = start_child();
    send_signal(&child, signal);
    assert_eq!(read_line(&mut heard), "interrupted");
    send_signal(&child, signal);
    assert_eq!(wait_for_exit(&mut child).code(), Some(128 + signal.as_raw()));
}

fn each_hangup_requests_one_reload_and_ends_nothing() {
    let (mut child, mut heard) = start_child();
    for _ in 0..2 {
        send_signal(&child, Signal::HUP);
        assert_eq!(read_line(&mut heard), "reload");
    }
    send_signal(&child, Signal::TERM);
    assert_eq!(read_line(&mut heard), "interrupted");
    drop(child.stdin.take());
    assert!(wait_for_exit(&mut child).success());
}

fn stop_beyond_its_limit_exits_with_its_message(error: Stdio) {
    let (mut child, _heard) = start_child_as(&["stuck"], error);
    send_signal(&child, Signal::TERM);
    assert_eq!(wait_for_exit(&mut child).code(), Some(3));
    let mut text = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut text).expect("it is text");
    assert_eq!(text, "error: stuck\n");
}

fn stop_beyond_its_limit_exits_although_stderr_is_not_read() {
    let (mut child, _heard) = start_child_as(&["stuck", "full"], Stdio::piped());
    send_signal(&child, Signal::TERM);
    assert_eq!(wait_for_exit(&mut child).code(), Some(3));
}

fn start_child() -> (Child, BufReader<ChildStdout>) {
    start_child_as(&["child"], Stdio::inherit())
}

fn start_child_as(words: &[&str], error: Stdio) -> (Child, BufReader<ChildStdout>) {
    let this = std::env::current_exe().expect("a test knows where it lies");
    let mut command = Command::new(this);
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(error);
    let mut child = command.spawn().expect("this program can be started again");
    let mut heard = BufReader::new(child.stdout.take().expect("piped above"));
    assert_eq!(read_line(&mut heard), "ready");
    (child, heard)
}

fn send_signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("the child is ours");
}

fn read_line(heard: &mut impl BufRead) -> String {
    let mut line = String::new();
    heard.read_line(&mut line).expect("the child speaks text");
    line.trim().into()
}

fn wait_for_exit(child: &mut Child) -> ExitStatus {
    child.wait().expect("the child is ours")
}
