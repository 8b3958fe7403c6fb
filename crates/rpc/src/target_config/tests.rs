//! Valid files, and each kind of error with its line number.

use tenmil_base::Span;
use tenmil_serve::SlowIoThresholds;

use super::{AnaStateConfig, ConfigError, HostsConfig, TargetConfig};

const WHOLE: &str = r#"
buffer-memory = "64m"
referrals = ["192.0.2.7:8009"]

[[listener]]
address = "tcp://192.0.2.1:4420"

[[listener]]
address = "127.0.0.1:4420"

[[subsystem]]
nqn = "nqn.2026-01.org.example:disks"
serial = "D1"
allowed-hosts = ["nqn.2026-01.org.example:one", "nqn.2026-01.org.example:two"]

[[subsystem.namespace]]
uri = "ram:1g"

[[subsystem.namespace]]
uri = "file:/var/tmp/disk?size=10g"
nsid = 7
read-only = true
allowed-hosts = ["nqn.2026-01.org.example:two"]
ana-group = 2

[[subsystem.path]]
listener = "127.0.0.1:4420"
ana-group = 2
ana-state = "non-optimized"

[[subsystem]]
nqn = "nqn.2026-01.org.example:near"
listeners = ["127.0.0.1:4420"]

[[subsystem.namespace]]
uri = "null:"
"#;

#[test]
fn file_with_every_key_is_parsed() {
    let read = TargetConfig::parse(WHOLE).unwrap();
    assert_eq!((read.memory_bytes, read.referrals.len()), (Some(64 << 20), 1));
    assert_eq!(read.listeners[0].address, "192.0.2.1:4420".parse().unwrap());
    let [disks, near] = read.subsystems.as_slice() else { panic!("two subsystems") };
    assert_eq!((disks.serial.as_deref(), disks.listeners.as_slice()), (Some("D1"), &[0, 1][..]));
    let names = ["one", "two"].map(|name| format!("nqn.2026-01.org.example:{name}"));
    assert_eq!(disks.hosts, HostsConfig::Only(names.to_vec()));
    let nsids: Vec<_> = disks.namespaces.iter().map(|namespace| namespace.nsid).collect();
    assert_eq!(nsids, [1, 7]);
    let seventh = &disks.namespaces[1];
    assert_eq!((seventh.is_read_only, seventh.ana_group), (true, 2));
    assert!(seventh.hosts.allows_host(&names[1]) && !seventh.hosts.allows_host(&names[0]));
    assert!(
        disks.namespaces[0].hosts.allows_host(&names[0]),
        "visible to every host that may connect"
    );
    let path = &disks.paths[0];
    assert_eq!((path.listener, path.ana_group, path.access), (1, 2, AnaStateConfig::NonOptimized));
    assert_eq!((&near.hosts, near.listeners.as_slice()), (&HostsConfig::Any, &[1][..]));
    let lines = (read.memory_line.0, read.listeners[1].line.0, near.line.0, seventh.line.0);
    assert_eq!(lines, (2, 9, 32, 20));
    // The line numbers do not matter for the comparison.
    assert_eq!(read, TargetConfig::parse(&format!("# moved\n{WHOLE}")).unwrap());
}

#[test]
fn omitted_limits_follow_from_the_number_of_connections() {
    let limits = |text: &str| {
        let read = TargetConfig::parse(&WHOLE.replace("[[listener]]\naddress = \"tcp", text));
        read.map(|read| read.limits.completed_with_defaults()).map_err(|wrong| wrong.to_string())
    };
    let rest = "\n[[listener]]\naddress = \"tcp";
    let said = |keys: &str| limits(&format!("[limits]\n{keys}{rest}"));
    let (most, usual) = said("").unwrap();
    assert_eq!((most, usual), (1100, tenmil_serve::tcp::AdmissionLimits::default_for(1100)));
    let (most, scaled) = said("connections = 400").unwrap();
    assert_eq!((most, scaled), (400, tenmil_serve::tcp::AdmissionLimits::default_for(400)));
    let all = "connections = 400\nconnections-per-address = 1\nconnections-per-host = 2\n\
        connections-of-loopback = 3\ndiscovery-connections = 4\n\
        discovery-connections-per-address = 5\nreserved-connections = 0\n\
        registrants-per-address = 7\nkeep-alive-max = \"2m\"";
    let (_, read) = said(all).unwrap();
    let counts = [read.per_address_max, read.per_host_max, read.loopback_max, read.discovery_max];
    assert_eq!(counts, [1, 2, 3, 4]);
    let counts = [read.discovery_per_address_max, read.reserved, read.registrants_per_address_max];
    assert_eq!((counts, read.keep_alive_max), ([5, 0, 7], Span::from_secs(120)));
    for (keys, expected) in [
        ("connections = 0", "line 6, `connections`: 0, expected 1 to 65536"),
        ("connections-per-host = 1101", "line 6, `connections-per-host`: 1101, expected 1 to 1100"),
        ("reserved-connections = 1100", "`reserved-connections`: 1100, expected 0 to 1099"),
        ("registrants-per-address = 129", "`registrants-per-address`: 129, expected 1 to 128"),
        ("keep-alive-max = \"0s\"", "`keep-alive-max`: '0s', expected 1s to 86400s"),
        ("keep-alive-max = \"2d\"", "`keep-alive-max`: '2d', expected 1s to 86400s"),
        ("connections-per-hosts = 1", "unknown field `connections-per-hosts`"),
    ] {
        let found = said(keys).unwrap_err();
        assert!(found.contains(expected), "{keys}: {found}");
    }
}

/// Characters that are escaped in displayed peer text are not accepted in names.
#[test]
fn names_with_terminal_control_characters_are_rejected() {
    for letter in (0..=u32::from(char::MAX)).filter_map(char::from_u32) {
        let is_refused = tenmil_wire::nqn::check_host_nqn(&format!("a{letter}b")).is_err();
        assert_eq!(
            is_refused,
            tenmil_base::text::is_terminal_control(letter) || letter.is_whitespace(),
            "{letter:?}"
        );
    }
}

/// Error for `WHOLE` with `found` replaced by `by`.
fn error_after_replacing(found: &str, by: &str) -> ConfigError {
    assert_eq!(WHOLE.matches(found).count(), 1, "{found} is in it once");
    TargetConfig::parse(&WHOLE.replace(found, by)).unwrap_err()
}

#[test]
fn error_names_line_key_and_expected_value() {
    let rows = [
        ("\"64m\"", "\"64\"", 2, "`buffer-memory`", "'64', expected at least 4m"),
        ("\"64m\"", "\"many\"", 2, "`buffer-memory`", "'many', expected at least 4m"),
        (
            "buffer-memory = \"64m\"",
            "state-dir = \"here\"",
            2,
            "`state-dir`",
            "'here', expected a path from /",
        ),
        ("192.0.2.7:8009", "there", 3, "`referrals`", "'there', expected an address and a port"),
        ("tcp://192.0.2.1:4420", "here", 6, "`address`", "'here', expected an address and a port"),
        ("tcp://192.0.2.1:4420", "127.0.0.1:4420", 9, "`address`", "is listened to already"),
        ("org.example:near", "org.example:disks", 32, "`nqn`", "another subsystem has this name"),
        ("nqn.2026-01.org.example:near", "near", 32, "`nqn`", "'near': NQN does not begin with"),
        (
            "nqn.2026-01.org.example:near",
            tenmil_wire::nqn::DISCOVERY,
            32,
            "`nqn`",
            "name of discovery",
        ),
        ("\"D1\"", "\"0123456789 0123456789\"", 13, "`serial`", "expected 1 to 20 printable"),
        ("\"D1\"", "\"\"", 13, "`serial`", "expected 1 to 20 printable"),
        ("nqn.2026-01.org.example:one", "a host", 14, "`allowed-hosts`", "'a host': NQN holds ' '"),
        (
            "nqn.2026-01.org.example:one",
            "foo",
            14,
            "`allowed-hosts`",
            "'foo': NQN does not begin with nqn.YYYY-MM. and a domain, expected the NQN of a host",
        ),
        (
            "org.example:one",
            "org.example:o\u{202e}ne",
            14,
            "`allowed-hosts`",
            "NQN holds '\\u{202e}'",
        ),
        ("\"ram:1g\"", "\"1g\"", 17, "`uri`", "'1g': "),
        ("\"ram:1g\"", "\"file:/var/tmp/disk?size=10g\"", 20, "`uri`", "namespace 1 is the same"),
        ("nsid = 7", "nsid = 0", 21, "`nsid`", "0, expected 1 to 1024"),
        ("nsid = 7", "nsid = 1025", 21, "`nsid`", "1025, expected 1 to 1024"),
        ("nsid = 7", "nsid = 1", 21, "`nsid`", "another namespace has 1"),
        ("nsid = 7", "nsid = \"7\"", 21, "`nsid`", "expected u32"),
        ("nsid = 7", "nsdi = 7", 21, "`nsdi`", "unknown field `nsdi`, expected one of"),
        ("ana-group = 2\n\n", "ana-group = 129\n\n", 24, "`ana-group`", "129, expected 1 to 128"),
        (
            "listener = \"127.0.0.1:4420\"",
            "listener = \"127.0.0.1:1\"",
            27,
            "`listener`",
            "127.0.0.1:1 is no listener, expected one of 192.0.2.1:4420, 127.0.0.1:4420",
        ),
        (
            "non-optimized",
            "slow",
            29,
            "`ana-state`",
            "'slow', expected one of optimized, non-optimized",
        ),
        ("listeners = [\"127.0.0.1:4420\"]", "listeners = []", 33, "`listeners`", "none are named"),
        (
            "listeners = [\"127.0.0.1:4420\"]",
            "",
            32,
            "`allowed-hosts`",
            "no host is named and 192.0.2.1:4420 can be reached from elsewhere",
        ),
        ("uri = \"null:\"", "", 35, "`[[subsystem.namespace]]`", "missing field `uri`"),
    ];
    for (found, by, line, key, problem) in rows {
        let said = error_after_replacing(found, by);
        assert_eq!((said.line, said.key.as_str()), (line, key), "{found} by {by}: {said}");
        assert!(said.problem.contains(problem), "{found} by {by}: {said}");
    }
}

#[test]
fn file_may_have_no_listener_no_subsystem_and_no_namespace_yet() {
    let read = TargetConfig::parse("# nothing yet\n").unwrap();
    assert_eq!((read.listeners.len(), read.subsystems.len()), (0, 0));
    let text = "[[subsystem]]\nnqn = 'nqn.2026-01.org.example:a'\nallowed-hosts = []\n";
    let read = TargetConfig::parse(text).unwrap();
    assert_eq!(read.subsystems[0].hosts, HostsConfig::Only(Vec::new()), "no host may connect");
    assert!(read.subsystems[0].namespaces.is_empty());
}

/// File with these devices (name and URI) and namespaces (URI and whether they are read-only). It
/// begins in line 1; each entry has three or four lines.
fn config_text_with_devices(devices: &[(&str, &str)], namespaces: &[(&str, bool)]) -> String {
    let devices =
        devices.iter().map(|(name, uri)| format!("[[device]]\nname='{name}'\nuri='{uri}'\n"));
    let namespaces = namespaces.iter().map(|(uri, only_read)| {
        format!("[[subsystem.namespace]]\nuri='{uri}'\nread-only={only_read}\n")
    });
    let (devices, namespaces): (String, String) = (devices.collect(), namespaces.collect());
    let listener = "[[listener]]\naddress='127.0.0.1:1'\n";
    format!("{devices}{listener}[[subsystem]]\nnqn='nqn.2026-01.org.example:a'\n{namespaces}")
}

#[test]
fn device_name_expands_to_its_uri() {
    let devices = [
        ("left", "file:/a?size=1g"),
        ("both", "mirror:[device:left],[file:/b]"),
        ("unused", "device:both"),
    ];
    let of = |devices: &[_], namespaces: &[_]| {
        let read = TargetConfig::parse(&config_text_with_devices(devices, namespaces)).unwrap();
        let namespaces = read.subsystems[0].namespaces.iter();
        namespaces.map(|one| one.uri.to_string()).collect::<Vec<_>>()
    };
    let parts = [
        ("split:[device:both]?offset=1m&size=1m", false),
        ("split:[device:both]?offset=2m", false),
        ("split:[device:both]?size=1m", false),
    ];
    let whole = "device:[mirror:[device:[file:/a?size=1g]/left],[file:/b]]/both";
    let expected = ["?offset=1m&size=1m", "?offset=2m", "?size=1m"];
    assert_eq!(of(&devices[..2], &parts), expected.map(|part| format!("split:[{whole}]{part}")));
    // A read-only use does not conflict with a writer.
    let readers = [("device:left", true), ("delay:[device:left]?read=1us", true)];
    let left = "device:[file:/a?size=1g]/left";
    assert_eq!(of(&devices[..1], &readers), [left.into(), format!("delay:[{left}]?read=1us")]);
}

#[test]
fn device_name_alone_is_the_device_and_a_suffix_after_slash_a_volume() {
    let devices = [("Cargo.toml", "ram:1g"), ("both", "mirror:[Cargo.toml],[file:/b]")];
    let of = |devices: &[_], namespaces: &[_]| {
        let read = TargetConfig::parse(&config_text_with_devices(devices, namespaces))?;
        let namespaces = read.subsystems[0].namespaces.iter();
        Ok::<_, ConfigError>(namespaces.map(|one| one.uri.to_string()).collect::<Vec<_>>())
    };
    let named = "device:[ram:1g]/Cargo.toml";
    let both = format!("device:[mirror:[{named}],[file:/b]]/both");
    let parts = [("split:[both]?size=1m", false), ("split:[both]?offset=1m", false)];
    let split = |part: &str| format!("split:[{both}]?{part}");
    assert_eq!(of(&devices, &parts).unwrap(), [split("size=1m"), split("offset=1m")]);
    let volumes = [("Cargo.toml/db", false), ("Cargo.toml/log", false), ("./Cargo.toml/db", false)];
    let volume = |name: &str| format!("volume:[{named}]/{name}");
    let file = "volume:[file:./Cargo.toml]/db".to_owned();
    assert_eq!(of(&devices[..1], &volumes).unwrap(), [volume("db"), volume("log"), file]);
    for namespaces in [
        [("Cargo.toml/db", false), ("Cargo.toml", false)],
        [("Cargo.toml/db", false), ("Cargo.toml", true)],
    ] {
        let error = of(&devices[..1], &namespaces).unwrap_err().to_string();
        assert!(error.contains("device `Cargo.toml` is used in line"), "{error}");
    }
    let error = of(&devices[..1], &[("cargo.toml/db", false)]).unwrap_err().to_string();
    assert!(error.contains("no such file or directory, expected KIND:"), "{error}");
}

#[test]
fn unknown_or_doubly_written_device_name_is_rejected() {
    let of = |devices: &[_], namespaces: &[_]| {
        let wrong =
            TargetConfig::parse(&config_text_with_devices(devices, namespaces)).unwrap_err();
        (wrong.line, wrong.to_string())
    };
    let left = ("left", "ram:1m");
    let mut rows = vec![
        (of(&[], &[("device:left", false)]), 6, "no device is called `left`, expected [[device]]"),
        (of(&[left], &[("device:right", false)]), 9, "is called `right`, expected one of left"),
        (of(&[left, left], &[]), 5, "another device is called 'left'"),
        (of(&[("a b", "ram:1m")], &[]), 2, "'a b', expected 1 to 64 letters"),
        (of(&[("a", "device:b"), ("b", "ram:1m")], &[]), 3, "no device is called `b`"),
        (of(&[("a", "device:a")], &[]), 3, "no device is called `a`"),
        (of(&[left], &[("device:left?x=1", false)]), 9, "no parameter `x`"),
        (of(&[left], &[("device:[ram:1m]/left", false)]), 9, "expected "),
    ];
    let collide = [
        ("device:left", "delay:[device:left]?read=1us"),
        ("device:left", "split:[device:left]?part=0&parts=2"),
        ("split:[device:left]?part=1&parts=3", "split:[device:left]?part=0&parts=2"),
        ("split:[device:left]?part=0&parts=1", "split:[device:left]?offset=1m"),
        ("split:[device:left]?offset=1m", "split:[device:left]?offset=2m"),
        ("split:[device:left]?offset=1m&size=1m", "split:[device:left]?size=1025k"),
    ];
    for (one, other) in collide {
        rows.push((of(&[left], &[(one, false), (other, true)]), 12, "is used in line 9 too"));
    }
    rows.push((
        of(&[left], &[("mirror:[device:left],[device:left]", true)]),
        9,
        "is used in line 9",
    ));
    for ((line, said), expected, problem) in rows {
        assert_eq!(line, expected, "{said}");
        assert!(said.contains(problem), "{said}");
    }
    let deep: Vec<_> = ["ram:1m".to_owned()]
        .into_iter()
        .chain((0..6).map(|below| format!("delay:[delay:[device:d{below}]]")))
        .enumerate()
        .map(|(at, uri)| (format!("d{at}"), uri))
        .collect();
    let deep: Vec<_> = deep.iter().map(|(name, uri)| (name.as_str(), uri.as_str())).collect();
    assert!(of(&deep, &[]).1.contains("more than 16 devices upon each other"));
}

#[test]
fn configuration_example_in_the_documentation_is_valid() {
    let document = include_str!("../../../../docs/operator/nvme-tcp-target.md");
    let file = document.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let read = TargetConfig::parse(file).unwrap();
    assert_eq!((read.listeners.len(), read.subsystems[0].namespaces.len()), (2, 2));
    assert_eq!(read.state.as_deref(), Some("/var/lib/tenmil".as_ref()));
}

#[test]
fn slow_io_of_a_namespace_replaces_that_of_all() {
    let text = format!("slow-io = \"10ms\"\n{WHOLE}");
    let text = text.replace("nsid = 7\n", "nsid = 7\nslow-io = \"off\"\n");
    let text = text.replace("uri = \"null:\"\n", "uri = \"null:\"\nslow-io = \"0.5ms\"\n");
    let read = TargetConfig::parse(&text).unwrap();
    let [disks, near] = read.subsystems.as_slice() else { panic!("two subsystems") };
    let ten = Some(Span::from_ms(10));
    let thresholds = disks.slow_io_thresholds(read.slow_io);
    assert_eq!((thresholds.default, thresholds.namespaces), (ten, [(7, None)].into()));
    let thresholds = near.slow_io_thresholds(read.slow_io);
    assert_eq!(thresholds.namespaces, [(1, Some(Span::from_us(500)))].into());
    let plain = TargetConfig::parse(WHOLE).unwrap();
    assert_eq!(plain.subsystems[0].slow_io_thresholds(plain.slow_io), SlowIoThresholds::default());
    let wrong = TargetConfig::parse(&text.replace("\"off\"", "\"never\"")).unwrap_err();
    assert_eq!((wrong.line, wrong.key.as_str()), (23, "`slow-io`"), "{wrong}");
}
