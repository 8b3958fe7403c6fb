//! Signals belong to a whole process, so this test is a program: it starts itself as a child and
//! sends signals to it, without a test harness.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tenmil_base::Span;
use tenmil_linux::signal::{
    catch_interrupts, catch_reload, interrupted, limit_stop, take_reload_request,
};

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("child") => return child(),
        Some("stuck") => return stuck(),
        _ => {}
    }
    for signal in [Signal::INT, Signal::TERM] {
        the_first_signal_ends_it_in_order(signal);
        the_second_signal_ends_it_at_once(signal);
    }
    each_hangup_is_told_once_and_ends_nothing();
    a_stop_that_takes_too_long_ends_with_its_message(Stdio::piped());
    a_stop_that_takes_too_long_ends_though_nobody_reads_its_message();
    println!("signals: the first ends a run in order, the second at once; SIGHUP is told");
}

/// Prints `ready`, prints `interrupted` when the flag is set, and ends when its input does.
fn child() {
    assert!(!interrupted());
    catch_interrupts().expect("handlers can be installed");
    catch_reload().expect("handlers can be installed");
    say("ready");
    while !interrupted() {
        if take_reload_request() {
            say("reload");
        }
        std::thread::park_timeout(std::time::Duration::from_millis(1));
    }
    say("interrupted");
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
}

/// Never stops by itself, with a limit of 50 ms.
fn stuck() {
    catch_interrupts().expect("handlers can be installed");
    limit_stop(Span::from_ms(50), "error: stuck\n".into(), 3).expect("a handler can be installed");
    if std::env::args().nth(2).as_deref() == Some("full") {
        fill_standard_error();
    }
    say("ready");
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

fn say(word: &str) {
    println!("{word}");
    std::io::stdout().flush().expect("the parent listens");
}

fn the_first_signal_ends_it_in_order(signal: Signal) {
    let (mut child, mut heard) = start();
    send(&child, signal);
    assert_eq!(hear(&mut heard), "interrupted");
    drop(child.stdin.take());
    assert!(wait(&mut child).success(), "it went on to its own end");
}

fn the_second_signal_ends_it_at_once(signal: Signal) {
    let (mut child, mut heard) = start();
    send(&child, signal);
    assert_eq!(hear(&mut heard), "interrupted");
    send(&child, signal);
    assert_eq!(wait(&mut child).code(), Some(128 + signal.as_raw()));
}

fn each_hangup_is_told_once_and_ends_nothing() {
    let (mut child, mut heard) = start();
    for _ in 0..2 {
        send(&child, Signal::HUP);
        assert_eq!(hear(&mut heard), "reload");
    }
    send(&child, Signal::TERM);
    assert_eq!(hear(&mut heard), "interrupted");
    drop(child.stdin.take());
    assert!(wait(&mut child).success());
}

fn a_stop_that_takes_too_long_ends_with_its_message(error: Stdio) {
    let (mut child, _heard) = start_as(&["stuck"], error);
    send(&child, Signal::TERM);
    assert_eq!(wait(&mut child).code(), Some(3));
    let mut text = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut text).expect("it is text");
    assert_eq!(text, "error: stuck\n");
}

fn a_stop_that_takes_too_long_ends_though_nobody_reads_its_message() {
    let (mut child, _heard) = start_as(&["stuck", "full"], Stdio::piped());
    send(&child, Signal::TERM);
    assert_eq!(wait(&mut child).code(), Some(3));
}

fn start() -> (Child, BufReader<ChildStdout>) {
    start_as(&["child"], Stdio::inherit())
}

fn start_as(words: &[&str], error: Stdio) -> (Child, BufReader<ChildStdout>) {
    let this = std::env::current_exe().expect("a test knows where it lies");
    let mut command = Command::new(this);
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(error);
    let mut child = command.spawn().expect("this program can be started again");
    let mut heard = BufReader::new(child.stdout.take().expect("piped above"));
    assert_eq!(hear(&mut heard), "ready");
    (child, heard)
}

fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("the child is ours");
}

fn hear(heard: &mut impl BufRead) -> String {
    let mut line = String::new();
    heard.read_line(&mut line).expect("the child speaks text");
    line.trim().into()
}

fn wait(child: &mut Child) -> ExitStatus {
    child.wait().expect("the child is ours")
}
