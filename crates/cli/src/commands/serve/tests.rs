//! Argument errors that are reported before anything is created.

use clap::Parser;
use tenmil_base::ErrorCategory;

use super::{ServeArguments, nvme_tcp};
use crate::commands::{CommandEngines, dispatch};

#[derive(Parser)]
struct ServeCommandLine {
    #[command(flatten)]
    serve: ServeArguments,
}

/// The error message of a rejected command line.
fn serve_error(line: &str) -> String {
    let words: Vec<_> = line.split_whitespace().map(Into::into).collect();
    let mut out = Vec::new();
    let refused = dispatch(&words, &CommandEngines::production(), &mut out).unwrap_err();
    assert_eq!((refused.category, out.len()), (ErrorCategory::Usage, 0), "{line}");
    refused.text
}

/// Neither a file nor a socket exists at that point.
#[test]
fn invalid_cores_and_scheduler_rules_are_rejected_before_anything_is_opened() {
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
            let text = serve_error(&format!(
                "tenmil serve file:{disk}?size=1m --listen {listen} {switch}"
            ));
            assert!(text.starts_with(said), "{listen} {switch}: {text}");
            let left = std::fs::read_dir(directory.path()).unwrap().count();
            assert_eq!(left, 0, "{listen} {switch}");
        }
    }
}

#[test]
fn limit_of_zero_connections_is_rejected() {
    assert_eq!(
        super::parse_connection_count("0"),
        Err("`0` is none, expected at least 1".to_owned())
    );
    assert_eq!(super::parse_connection_count("7"), Ok(7));
    assert!(super::parse_connection_count("many").is_err());
}

/// What only shows when it is offered, behind all that is checked before.
#[test]
fn server_that_cannot_export_everything_does_not_start() {
    // Its rights are those of the process that runs the other tests.
    let line = ["serve", "ram:1m", "--listen", "tcp://127.0.0.1:0", "--sandbox", "off"];
    let arguments = ServeCommandLine::parse_from(line).serve;
    let requested = |count| {
        let listeners = vec!["127.0.0.1:0".parse().unwrap()];
        let mut requested = nvme_tcp::config_from_arguments(&arguments, listeners, &[]).unwrap();
        requested.subsystems = vec![requested.subsystems[0].clone(); count];
        requested
    };
    // Where it says that it is ready nothing can be written: one that begins ends with that.
    #[expect(clippy::disallowed_methods, reason = "a test may")]
    let mut full = std::fs::File::create("/dev/full").unwrap();
    let refused = nvme_tcp::serve_nvme_tcp(&arguments, requested(2).into(), &mut full).unwrap_err();
    let expected = "serve: cannot export nqn.2026-01.org.tenmil:disk: a subsystem with this NQN \
                    is exported already, expected another NQN";
    assert_eq!((refused.text.as_str(), refused.category), (expected, ErrorCategory::Environment));
    let refused = nvme_tcp::serve_nvme_tcp(&arguments, requested(1).into(), &mut full).unwrap_err();
    assert!(!refused.text.starts_with("serve: "), "{}", refused.text);
}

#[test]
fn keys_of_the_options_are_those_of_the_allowed_hosts() {
    let config = |words: &str| {
        let line = format!("serve ram:1m --listen tcp://127.0.0.1:0 {words}");
        let arguments = ServeCommandLine::parse_from(line.split_whitespace()).serve;
        nvme_tcp::config_from_arguments(&arguments, vec!["127.0.0.1:0".parse().unwrap()], &[])
    };
    let read = config(
        "--allowed-host nqn.2026-01.a --allowed-host nqn.2026-01.b --dhchap c1 --dhchap c2 --dhchap-controller cc \
         --tls required --psk p --keyring /k",
    )
    .unwrap();
    let security = &read.subsystems[0].security;
    assert!(security.authentication_required);
    let hosts: Vec<_> = security.hosts.iter().map(|host| host.nqn.as_str()).collect();
    assert_eq!(hosts, ["nqn.2026-01.a", "nqn.2026-01.b"]);
    let [one, _] = security.hosts.as_slice() else { panic!("two hosts") };
    let names: Vec<_> = one.dhchap.iter().map(|key| key.name.as_str()).collect();
    assert_eq!((names, one.psk[0].name.as_str()), (vec!["c1", "c2"], "p"));
    assert_eq!(read.listeners[0].security, tenmil_serve::tcp::PortSecurity::TlsRequired);
    assert_eq!(read.keyring.as_deref(), Some("/k".as_ref()));
    for (words, expected) in [
        ("--psk p --allowed-host nqn.2026-01.a", "--psk without TLS"),
        ("--tls required --allowed-host nqn.2026-01.a", "--tls required without --psk"),
        (
            "--dhchap-controller c --allowed-host nqn.2026-01.a",
            "--dhchap-controller without --dhchap",
        ),
        ("--dhchap c", "keys are given without a host"),
        ("--allowed-host foo", "--allowed-host `foo`: NQN does not begin with nqn.YYYY-MM."),
        ("--nqn foo", "--nqn `foo`: NQN does not begin with nqn.YYYY-MM."),
        ("--dhchap a/b --allowed-host nqn.2026-01.a", "name of a key: found '/' in it"),
    ] {
        let refused = config(words).unwrap_err();
        assert!(refused.text.contains(expected), "{words}: {refused}");
    }
    assert!(!config("--tls allowed").unwrap().names_keys(), "for keys that are generated");
}
