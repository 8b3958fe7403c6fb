//! Targets whose answers are changed on the way: a controller that refuses Asynchronous Event
//! Configuration, one whose registers read as all ones, and a discovery log of impossible length.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};

use crate::served::ServeProcess;

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");
const NQN: &str = "nqn.2026-01.org.tenmil:disk";

/// PDU types, and fields of commands (NVMe/TCP 1.1 §3.6, Base 2.1 §5.1.25, §6.4, §5.1.12).
const CAPSULE_COMMAND: u8 = 4;
const CAPSULE_RESPONSE: u8 = 5;
const DATA_TO_HOST: u8 = 7;
const SET_FEATURES: u8 = 0x09;
const EVENT_CONFIGURATION: u8 = 0x0b;
const FABRICS: u8 = 0x7f;
const PROPERTY_GET: u8 = 0x04;
const GET_LOG_PAGE: u8 = 0x02;
const DISCOVERY_LOG: u8 = 0x70;
/// Invalid Field in Command, Do Not Retry, as the last two bytes of a completion.
const REFUSED: [u8; 2] = ((0x4000_u16 | 0x02) << 1).to_le_bytes();

/// Stands between hosts and the target at `to`, and has `change` change every PDU that answers a command
/// chosen by `is_chosen`. Ends with the process.
fn start_rewriting_proxy(
    to: SocketAddr,
    is_chosen: fn(&[u8]) -> bool,
    change: fn(&mut [u8]),
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for host in listener.incoming().map_while(Result::ok) {
            let target = TcpStream::connect(to).unwrap();
            let asked = Arc::new(Mutex::new(BTreeSet::new()));
            let (from, into) = (host.try_clone().unwrap(), target.try_clone().unwrap());
            let seen = Arc::clone(&asked);
            std::thread::spawn(move || {
                forward_pdus(from, into, |unit| {
                    if unit[0] == CAPSULE_COMMAND {
                        let (id, mut seen) = ([unit[10], unit[11]], seen.lock().unwrap());
                        if is_chosen(unit) {
                            seen.insert(id)
                        } else {
                            seen.remove(&id)
                        };
                    }
                });
            });
            std::thread::spawn(move || {
                forward_pdus(target, host, |unit| {
                    let id = match unit[0] {
                        CAPSULE_RESPONSE => [unit[20], unit[21]],
                        DATA_TO_HOST => [unit[8], unit[9]],
                        _ => return,
                    };
                    if asked.lock().unwrap().contains(&id) {
                        change(unit);
                    }
                });
            });
        }
    });
    address
}

/// Turns every answer to Set Features of the Asynchronous Event Configuration into a refusal.
fn proxy_rejecting_event_configuration(to: SocketAddr) -> SocketAddr {
    start_rewriting_proxy(
        to,
        |unit| (unit[8], unit[48]) == (SET_FEATURES, EVENT_CONFIGURATION),
        |unit| unit[22..24].copy_from_slice(&REFUSED),
    )
}

/// Passes units on, each as `change` leaves it, until an end closes.
fn forward_pdus(mut from: TcpStream, mut into: TcpStream, mut change: impl FnMut(&mut [u8])) {
    let mut header = [0; 8];
    while from.read_exact(&mut header).is_ok() {
        let len = u32::from_le_bytes(header[4..].try_into().unwrap()) as usize;
        let mut unit = vec![0; len];
        unit[..8].copy_from_slice(&header);
        if from.read_exact(&mut unit[8..]).is_err() {
            break;
        }
        change(&mut unit);
        if into.write_all(&unit).is_err() {
            break;
        }
    }
    // The other end may have gone first.
    let _ = into.shutdown(std::net::Shutdown::Both);
}

/// What `perf` says about the device at these addresses while it runs.
fn perf_stderr_about(addresses: &str) -> String {
    let uri = format!("tcp://{addresses}/{NQN}");
    let output = Command::new(TENMIL).args(["perf", &uri, "-t", "0.2"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn missing_event_support_is_logged_on_one_and_on_several_paths() {
    let served = ServeProcess::start_shell_line(&format!(
        "{TENMIL} serve ram:16m --listen tcp://127.0.0.1:0"
    ));
    let target = served.ready.trim().strip_prefix("ready tcp://").unwrap();
    let refusing = proxy_rejecting_event_configuration(target.parse().unwrap()).to_string();
    let reported = |path: usize, address: &str| {
        let address = format!("({address})");
        move |line: &str| {
            line.contains(&format!("path {path}: its controller will not tell of changes"))
                && line.contains(&address)
        }
    };
    let said = perf_stderr_about(&refusing);
    assert_eq!(said.lines().filter(|line| reported(0, &refusing)(line)).count(), 1, "{said}");
    let said = perf_stderr_about(&format!("{target},{refusing}"));
    assert_eq!(said.lines().filter(|line| reported(1, &refusing)(line)).count(), 1, "{said}");
    let said = perf_stderr_about(target);
    assert!(!said.contains("will not tell of changes"), "{said}");
}

/// Exit status and standard error of a command about a target whose answers are changed.
fn exit_code_and_stderr(words: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(TENMIL).args(words).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn registers_reading_all_ones_are_named_in_the_error() {
    let served = ServeProcess::start_shell_line(&format!(
        "{TENMIL} serve ram:16m --listen tcp://127.0.0.1:0"
    ));
    let target = served.ready.trim().strip_prefix("ready tcp://").unwrap();
    let ones = start_rewriting_proxy(
        target.parse().unwrap(),
        |unit| (unit[8], unit[12]) == (FABRICS, PROPERTY_GET),
        |unit| unit[8..16].fill(0xff),
    );
    for words in
        [["identify", &format!("tcp://{ones}/{NQN}")], ["discover", &format!("tcp://{ones}")]]
    {
        let (code, error) = exit_code_and_stderr(&words);
        assert_eq!(code, Some(3), "{words:?}: {error}");
        assert!(error.contains("reads as") && error.contains("ones"), "{words:?}: {error}");
    }
}

#[test]
fn discovery_log_of_impossible_length_is_rejected_unread() {
    let served = ServeProcess::start_shell_line(&format!(
        "{TENMIL} serve ram:16m --listen tcp://127.0.0.1:0"
    ));
    let target = served.ready.trim().strip_prefix("ready tcp://").unwrap();
    // NUMREC of the header (Base 2.1 §5.1.12.3.1).
    let endless = start_rewriting_proxy(
        target.parse().unwrap(),
        |unit| (unit[8], unit[48]) == (GET_LOG_PAGE, DISCOVERY_LOG),
        |unit| {
            if unit[0] == DATA_TO_HOST {
                unit[24 + 8..24 + 16].copy_from_slice(&70_000_u64.to_le_bytes());
            }
        },
    );
    let (code, error) = exit_code_and_stderr(&["discover", &format!("tcp://{endless}")]);
    assert_eq!(code, Some(3), "{error}");
    assert!(error.contains("it has 70000 entries, expected at most 65536"), "{error}");
}
