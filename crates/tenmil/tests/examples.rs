//! The examples do what they say, and end.

use std::error::Error;
use std::sync::mpsc;
use std::time::Duration;

use tenmil_linux::NamedThread;

/// Far longer than any of them takes on a busy machine.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Each example as a module, and a test that runs its `main`.
macro_rules! examples {
    ($($name:ident = $path:literal;)*) => {
        $(
            #[allow(dead_code, reason = "its `main` is called here")]
            #[path = $path]
            mod $name;
        )*
        mod ends {
            $(
                #[test]
                fn $name() {
                    super::assert_example_succeeds(stringify!($name), super::$name::main);
                }
            )*
        }
    };
}

examples! {
    one_block = "../examples/1_one_block.rs";
    a_million_reads = "../examples/2_a_million_reads.rs";
    serve_a_ram_disk = "../examples/3_serve_a_ram_disk.rs";
    from_tokio = "../examples/4_from_tokio.rs";
    from_smol = "../examples/5_from_smol.rs";
    async_on_a_reactor = "../examples/6_async_on_a_reactor.rs";
    a_block_device_of_your_own = "../examples/7_a_block_device_of_your_own.rs";
    a_device_that_misbehaves = "../examples/8_a_device_that_misbehaves.rs";
}

#[allow(dead_code, reason = "its `run` is called here")]
#[path = "../examples/mixed.rs"]
mod mixed;

/// Runs an example on a thread of its own, and gives it up if it does not end.
fn assert_example_succeeds(name: &str, example: fn() -> Result<(), Box<dyn Error>>) {
    let (send, ended) = mpsc::channel();
    let run = move |_: &tenmil_linux::StopFlag| {
        drop(send.send(example().map_err(|error| error.to_string())))
    };
    let thread = NamedThread::spawn(name, None, run).expect("a thread");
    match ended.recv_timeout(TIME_LIMIT) {
        Ok(result) => assert_eq!(result, Ok(()), "{name}"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {}
        Err(mpsc::RecvTimeoutError::Timeout) => {
            // It cannot be joined either.
            std::mem::forget(thread);
            panic!("{name}: no end after {TIME_LIMIT:?}");
        }
    }
    // If it panicked, so does this.
    thread.join();
}

#[test]
fn mixed_example_reads_beside_writes() {
    assert_example_succeeds("mixed", || {
        mixed::run_mixed_load("ram:64m", Duration::from_millis(50))
    });
}

/// An example that no test runs soon stops working.
#[test]
fn every_example_has_a_test() {
    let here = include_str!("examples.rs");
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");
    for entry in std::fs::read_dir(directory).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(here.contains(&format!("../examples/{name}")), "{name} is not run");
    }
}
