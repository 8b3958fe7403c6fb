//! Reservations that are kept belong to a disk, not to the number of a namespace.

use std::os::unix::fs::DirBuilderExt;
use std::process::Command;

use crate::served::ServeProcess;

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");
/// The subsystem that the record is of.
const NQN: &str = "nqn.2026-01.org.tenmil:disk";
/// A host is registered and holds the reservation.
const RECORD: &[u8] = include_bytes!("../../../serve/tests/data/reservations-format-1");

#[test]
fn swapped_file_is_rejected_with_the_disk_that_has_the_reservations() {
    let root = tempfile::tempdir().unwrap();
    let [a, b, aside, state] = ["a", "b", "aside", "state"].map(|name| root.path().join(name));
    for path in [&a, &b] {
        std::fs::File::create_new(path).unwrap().set_len(1 << 20).unwrap();
    }
    std::fs::DirBuilder::new().mode(0o700).create(&state).unwrap();
    let hash = NQN.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let record = format!("reservations-{hash:016x}-1");
    std::fs::write(state.join(&record), RECORD).unwrap();
    let serve = |more: &str| {
        let (a, state) = (a.display(), state.display());
        format!("{TENMIL} serve file:{a} --listen tcp://127.0.0.1:0 --state-dir {state} {more}")
    };
    let adopt = format!("--adopt-reservations {record}");
    assert_eq!(ServeProcess::start_shell_line(&serve(&adopt)).stop_with_sigterm(), Some(0));
    assert_eq!(ServeProcess::start_shell_line(&serve("")).stop_with_sigterm(), Some(0));
    let swap = || {
        for (from, to) in [(&a, &aside), (&b, &a), (&aside, &b)] {
            std::fs::rename(from, to).unwrap();
        }
    };
    swap();
    let mut command = Command::new("sh");
    command.args(["-c", &format!("exec timeout 20 {}", serve(""))]);
    let output = command.env("XDG_RUNTIME_DIR", root.path()).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code().is_some_and(|code| ![0, 124].contains(&code)), "{error}");
    assert!(error.contains("it holds the reservations of disk `file:"), "{error}");
    swap();
    assert_eq!(ServeProcess::start_shell_line(&serve("")).stop_with_sigterm(), Some(0));
}
