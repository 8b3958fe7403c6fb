//! Argument errors that are reported before anything is created.

use clap::Parser;
use tenmil_base::ErrorCategory;

use super::{ServeArguments, fabrics};
use crate::commands::{Engines, dispatch};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    serve: ServeArguments,
}

/// The error message of a rejected command line.
fn refused(line: &str) -> String {
    let words: Vec<_> = line.split_whitespace().map(Into::into).collect();
    let mut out = Vec::new();
    let refused = dispatch(&words, &Engines::real(), &mut out).unwrap_err();
    assert_eq!((refused.category, out.len()), (ErrorCategory::Usage, 0), "{line}");
    refused.text
}

/// Neither a file nor a socket exists at that point.
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
                "--scheduler dynamic?scheduling-core=1000",
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

/// What only shows when it is offered, behind all that is checked before.
#[test]
fn a_server_that_cannot_offer_all_that_it_was_asked_to_does_not_begin() {
    let line = ["serve", "ram:1m", "--listen", "tcp://127.0.0.1:0"];
    let arguments = Line::parse_from(line).serve;
    let requested = |count| {
        let listeners = vec!["127.0.0.1:0".parse().unwrap()];
        let mut requested = fabrics::config_from_arguments(&arguments, listeners).unwrap();
        requested.subsystems = vec![requested.subsystems[0].clone(); count];
        requested
    };
    // Where it says that it is ready nothing can be written: one that begins ends with that.
    #[expect(clippy::disallowed_methods, reason = "a test may")]
    let mut full = std::fs::File::create("/dev/full").unwrap();
    let refused = fabrics::run(&arguments, requested(2), &mut full).unwrap_err();
    let expected = "serve: cannot export nqn.2026-01.org.tenmil:disk: a subsystem with this NQN \
                    is exported already, expected another NQN";
    assert_eq!((refused.text.as_str(), refused.category), (expected, ErrorCategory::Environment));
    let refused = fabrics::run(&arguments, requested(1), &mut full).unwrap_err();
    assert!(!refused.text.starts_with("serve: "), "{}", refused.text);
}
