//! A controller that will not tell of changes (Asynchronous Event Configuration refused): people are
//! told so, whether one path leads to it or several.

#![expect(clippy::unwrap_used, reason = "a test may")]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "it stands between sockets"
)]

#[expect(dead_code, reason = "this test uses a part of it")]
mod served;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};

use served::Served;

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");
const NQN: &str = "nqn.2026-01.org.tenmil:disk";

/// PDU types, and what is looked at in commands (NVMe/TCP 1.0 §3.6, Base 2.1 §5.1.25).
const CAPSULE_COMMAND: u8 = 4;
const CAPSULE_RESPONSE: u8 = 5;
const SET_FEATURES: u8 = 0x09;
const EVENT_CONFIGURATION: u8 = 0x0b;
/// Invalid Field in Command, Do Not Retry, as the last two bytes of a completion.
const REFUSED: [u8; 2] = ((0x4000_u16 | 0x02) << 1).to_le_bytes();

/// Stands between hosts and the target at `to`, and turns every answer to Set Features of the
/// Asynchronous Event Configuration into a refusal. Ends with the process.
fn refuse_event_configuration(to: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for host in listener.incoming().map_while(Result::ok) {
            let target = TcpStream::connect(to).unwrap();
            let asked = Arc::new(Mutex::new(BTreeSet::new()));
            let (from, into) = (host.try_clone().unwrap(), target.try_clone().unwrap());
            let seen = Arc::clone(&asked);
            std::thread::spawn(move || {
                forward(from, into, |unit| {
                    let is_asked = unit[0] == CAPSULE_COMMAND
                        && (unit[8], unit[48]) == (SET_FEATURES, EVENT_CONFIGURATION);
                    if is_asked {
                        seen.lock().unwrap().insert([unit[10], unit[11]]);
                    }
                });
            });
            std::thread::spawn(move || {
                forward(target, host, |unit| {
                    if unit[0] == CAPSULE_RESPONSE
                        && asked.lock().unwrap().remove(&[unit[20], unit[21]])
                    {
                        unit[22..24].copy_from_slice(&REFUSED);
                    }
                });
            });
        }
    });
    address
}

/// Passes units on, each as `change` leaves it, until an end closes.
fn forward(mut from: TcpStream, mut into: TcpStream, mut change: impl FnMut(&mut [u8])) {
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
fn said_about(addresses: &str) -> String {
    let uri = format!("tcp://{addresses}/{NQN}");
    let output = Command::new(TENMIL).args(["perf", &uri, "-t", "0.2"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn people_are_told_of_a_controller_that_tells_of_no_change_on_one_path_and_on_several() {
    let served = Served::of(&format!("{TENMIL} serve ram:16m --listen tcp://127.0.0.1:0"));
    let target = served.ready.trim().strip_prefix("ready tcp://").unwrap();
    let refusing = refuse_event_configuration(target.parse().unwrap()).to_string();
    let told = |path: usize, address: &str| {
        let address = format!("({address})");
        move |line: &str| {
            line.contains(&format!("path {path}: its controller will not tell of changes"))
                && line.contains(&address)
        }
    };
    let said = said_about(&refusing);
    assert_eq!(said.lines().filter(|line| told(0, &refusing)(line)).count(), 1, "{said}");
    let said = said_about(&format!("{target},{refusing}"));
    assert_eq!(said.lines().filter(|line| told(1, &refusing)(line)).count(), 1, "{said}");
    let said = said_about(target);
    assert!(!said.contains("will not tell of changes"), "{said}");
}
