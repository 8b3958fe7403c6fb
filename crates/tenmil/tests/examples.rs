//! The examples do what they say, and end.

#[allow(dead_code, reason = "its `main` is called here")]
#[path = "../examples/async_on_a_reactor.rs"]
mod async_on_a_reactor;
#[allow(dead_code, reason = "its `main` is called here")]
#[path = "../examples/from_smol.rs"]
mod from_smol;
#[allow(dead_code, reason = "its `main` is called here")]
#[path = "../examples/from_tokio.rs"]
mod from_tokio;

#[allow(dead_code, reason = "its `run` is called here")]
#[path = "../examples/mixed.rs"]
mod mixed;

use std::error::Error;
use std::sync::mpsc;
use std::time::Duration;

use host::Thread;

/// Far longer than any of them takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs an example on a thread of its own, and gives it up if it does not end.
fn ends_well(name: &str, example: fn() -> Result<(), Box<dyn Error>>) {
    let (send, ended) = mpsc::channel();
    let run = move |_: &host::Stop| drop(send.send(example().map_err(|error| error.to_string())));
    let thread = Thread::spawn(name, None, run).expect("a thread");
    match ended.recv_timeout(PATIENCE) {
        Ok(result) => assert_eq!(result, Ok(()), "{name}"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {}
        Err(mpsc::RecvTimeoutError::Timeout) => {
            // It cannot be joined either.
            std::mem::forget(thread);
            panic!("{name}: no end after {PATIENCE:?}");
        }
    }
    // If it panicked, so does this.
    thread.join();
}

#[test]
fn async_on_a_reactor_writes_and_reads_back() {
    ends_well("async_on_a_reactor", async_on_a_reactor::main);
}

#[test]
fn from_tokio_writes_and_reads_back() {
    ends_well("from_tokio", from_tokio::main);
}

#[test]
fn from_smol_writes_and_reads_back() {
    ends_well("from_smol", from_smol::main);
}

#[test]
fn mixed_reads_beside_writes() {
    ends_well("mixed", || mixed::run("ram:64m", base::Span::from_ms(50)));
}
