//! What is refused before anything is there.

use base::Blame;

use crate::cli::{Engines, dispatch};

/// Why a command line is refused.
fn refused(line: &str) -> String {
    let words: Vec<_> = line.split_whitespace().map(Into::into).collect();
    let mut out = Vec::new();
    let refused = dispatch(&words, &Engines::real(), &mut out).unwrap_err();
    assert_eq!((refused.blame, out.len()), (Blame::Caller, 0), "{line}");
    refused.text
}

/// Before a file is made, and before anybody could find a socket.
#[test]
fn cores_and_rules_about_cores_are_refused_before_anything_is_opened() {
    let directory = tempfile::tempdir().unwrap();
    let (disk, socket) = (directory.path().join("disk"), directory.path().join("socket"));
    let (disk, socket) = (disk.display(), socket.display());
    for listen in [
        format!("nbd:{socket}"),
        format!("vfio-user:{socket}"),
        format!("vhost-user:{socket}"),
        "tcp://127.0.0.1:0".to_owned(),
        "ublk:0".to_owned(),
    ] {
        for (switch, said) in [
            ("--cores 1023", "-c 1023: core 1023 does not exist or is not ours, expected some of "),
            (
                "--scheduler dynamic?gather=1000",
                "scheduler: scheduling core is 1000, expected a reactor's",
            ),
            ("--scheduler static?isolated=1000", "scheduler: isolated cores are 1000"),
        ] {
            let text =
                refused(&format!("tenmil serve file:{disk}?size=1m --listen {listen} {switch}"));
            assert!(text.starts_with(said), "{listen} {switch}: {text}");
            let left = std::fs::read_dir(directory.path()).unwrap().count();
            assert_eq!(left, 0, "{listen} {switch}");
        }
    }
}

#[test]
fn a_limit_of_no_connections_is_refused() {
    assert_eq!(super::some_connections("0"), Err("`0` is none, expected at least 1".to_owned()));
    assert_eq!(super::some_connections("7"), Ok(7));
    assert!(super::some_connections("many").is_err());
}
