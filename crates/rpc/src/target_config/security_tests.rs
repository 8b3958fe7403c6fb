//! Tests of the security settings of a configuration file.

use tenmil_keyring::{KernelPsks, Key, KeyKind, Keyring, Overwrite};
use tenmil_nvme_auth::{ChapSecret, ConcatenationPolicy, ConfiguredPsk, Group, Hash, KeyHash};
use tenmil_serve::tcp::{
    HostRights, NamedKey, NamespaceSelection, PortSecurity, SubsystemSecurity,
};

use super::{ConfigError, HostsConfig, KeySources, TargetConfig, migrate_config};

const WHOLE: &str = r#"
keyring = "/etc/tenmil/keys"

[[listener]]
address = "192.0.2.1:4420"
tls = "required"
allowed-networks = ["192.0.2.0/24"]

[[listener]]
address = "127.0.0.1:4420"
tls = "allowed"

[discovery]
authentication = "required"

[[subsystem]]
nqn = "nqn.2026-01.org.example:disks"
allowed-hosts = [
    { nqn = "nqn.2026-01.a:one", dhchap = ["c1", "c0"], dhchap-controller = "cc", psk = ["p1", "p0"] },
    { nqn = "nqn.2026-01.a:two", dhchap = ["c2"], psk = ["p2"], read-only = [2], reservations = false, connections = 8, buffer-memory = "16m" },
    { nqn = "nqn.2026-01.a:three", dhchap = ["c3"], psk = ["p3"], read-only = true },
]
authentication = "required"
secure-channel = "required"
authenticate-io-queues = false
dhchap-hashes = ["sha512", "sha256"]
dhchap-groups = ["ffdhe4096", "null"]
concatenation = "refused"
allowed-networks = ["192.0.2.0/25", "127.0.0.1"]

[[subsystem.namespace]]
uri = "ram:1m"

[[subsystem.namespace]]
uri = "null:"
"#;

#[test]
fn every_security_key_is_parsed() {
    let read = TargetConfig::parse(WHOLE).unwrap();
    assert_eq!(read.keyring.as_deref(), Some("/etc/tenmil/keys".as_ref()));
    let listeners: Vec<_> = read.listeners.iter().map(|one| one.security).collect();
    assert_eq!(listeners, [PortSecurity::TlsRequired, PortSecurity::TlsAllowed]);
    assert_eq!(read.listeners[0].networks, ["192.0.2.0/24".parse().unwrap()]);
    let subsystem = &read.subsystems[0];
    let names = ["one", "two", "three"].map(|name| format!("nqn.2026-01.a:{name}"));
    assert_eq!(subsystem.hosts, HostsConfig::Only(names.to_vec()));
    let security = &subsystem.security;
    let required = (security.authentication_required, security.secure_channel_required);
    assert_eq!((required, security.authenticate_io_queues), ((true, true), false));
    assert_eq!(security.policy.hashes, [Hash::Sha512, Hash::Sha256]);
    assert_eq!(security.policy.groups, [Group::Ffdhe4096, Group::Null]);
    assert_eq!(security.policy.concatenation, ConcatenationPolicy::Refused);
    assert_eq!(security.networks.len(), 2);
    let [one, two, three] = security.hosts.as_slice() else { panic!("three hosts") };
    let names = |keys: &[super::KeyReference]| {
        keys.iter().map(|key| (key.name.to_string(), key.line.0)).collect::<Vec<_>>()
    };
    assert_eq!(names(&one.dhchap), [("c1".into(), 19), ("c0".into(), 19)]);
    assert_eq!(names(&one.psk), [("p1".into(), 19), ("p0".into(), 19)]);
    assert_eq!(one.dhchap_controller.as_ref().unwrap().name.as_str(), "cc");
    assert_eq!(one.rights, HostRights::default());
    let rights = HostRights {
        read_only: NamespaceSelection::Listed([2].into()),
        reservations: false,
        connections_max: Some(8),
        memory_bytes_max: Some(16 << 20),
    };
    assert_eq!((&two.rights, &three.rights.read_only), (&rights, &NamespaceSelection::All));
    // Discovery has the keys of all subsystems, and no rights.
    assert!(read.discovery.authentication_required && !read.discovery.secure_channel_required);
    assert_eq!(read.discovery.hosts.len(), 3);
    assert!(read.discovery.hosts.iter().all(|host| host.rights == HostRights::default()));
    assert!(read.names_keys() && read.kernel_psks_line().is_none());
    // A file without keys of 0.1 is not converted, and no keyring is needed for that.
    assert_eq!(migrate_config(WHOLE).unwrap().changes, Vec::<String>::new());
}

#[test]
fn file_without_security_keys_requires_nothing() {
    let namespace = WHOLE.split("[[subsystem.namespace]]").nth(1).unwrap();
    let plain = format!(
        "[[listener]]\naddress = \"127.0.0.1:1\"\n[[subsystem]]\nnqn = \"nqn.2026-01.org.example:a\"\n\
         [[subsystem.namespace]]{namespace}"
    );
    let read = TargetConfig::parse(&plain).unwrap();
    let security = read.subsystems[0].security.read_keys(KeySources::default(), None).unwrap();
    assert_eq!(security, SubsystemSecurity::default());
    assert_eq!(
        read.discovery.read_keys(KeySources::default(), None).unwrap(),
        SubsystemSecurity::default()
    );
    assert_eq!(read.listeners[0].security, PortSecurity::Plaintext);
    assert!(!read.names_keys());
}

/// Linux's nvme-cli cannot authenticate in discovery, and needs a TLS key where a listener requires TLS.
#[test]
fn discovery_without_a_table_has_the_tls_keys_of_all_subsystems_and_no_secrets() {
    let text = WHOLE.replace("[discovery]\nauthentication = \"required\"\n", "");
    let other = "\n[[subsystem]]\nnqn = \"nqn.2026-01.org.example:other\"\nallowed-hosts = [\n    \
                 { nqn = \"nqn.2026-01.a:one\", psk = [\"p1\", \"p4\"], connections = 1 },\n    \
                 { nqn = \"nqn.2026-01.a:four\", dhchap = [\"c4\"] },\n]\nlisteners = \
                 [\"127.0.0.1:4420\"]\n[[subsystem.namespace]]\nuri = \"null:?size=1m\"\n";
    let read = TargetConfig::parse(&format!("{text}{other}")).unwrap();
    let security = &read.discovery;
    assert!(!security.authentication_required && !security.secure_channel_required);
    let psks = |host: &super::HostSecurityConfig| {
        let names = host.psk.iter().map(|key| key.name.to_string());
        (host.nqn.clone(), names.collect::<Vec<_>>().join(" "))
    };
    let found: Vec<_> = security.hosts.iter().map(psks).collect();
    let expected = [
        ("nqn.2026-01.a:one", "p1 p0 p4"),
        ("nqn.2026-01.a:two", "p2"),
        ("nqn.2026-01.a:three", "p3"),
    ];
    assert_eq!(found, expected.map(|(host, names)| (host.to_owned(), names.to_owned())));
    assert!(security.hosts.iter().all(|host| host.dhchap.is_empty()
        && host.dhchap_controller.is_none()
        && host.rights == HostRights::default()));
}

fn error_after_replacing(found: &str, by: &str) -> ConfigError {
    assert_eq!(WHOLE.matches(found).count(), 1, "{found} is in it once");
    TargetConfig::parse(&WHOLE.replace(found, by)).unwrap_err()
}

#[test]
fn error_names_line_key_and_expected_value() {
    let two = "{ nqn = \"nqn.2026-01.a:two\", dhchap = [\"c2\"], psk = [\"p2\"], read-only = [2], \
               reservations = false, connections = 8, buffer-memory = \"16m\" }";
    let rows = [
        ("\"/etc/tenmil/keys\"", "\"keys\"", 2, "`keyring`", "'keys', expected a path from /"),
        (
            "tls = \"allowed\"",
            "tls = \"yes\"",
            11,
            "`tls`",
            "'yes', expected one of off, allowed, req",
        ),
        ("\"192.0.2.0/24\"", "\"192.0.2.1/24\"", 7, "`allowed-networks`", "bits behind the prefix"),
        ("[\"192.0.2.0/24\"]", "[]", 7, "`allowed-networks`", "none are named"),
        ("[\"c1\", \"c0\"]", "[]", 19, "`dhchap`", "none are named, expected at least one"),
        ("\"cc\"", "\"../cc\"", 19, "`dhchap-controller`", "found '/' in it"),
        ("dhchap = [\"c1\", \"c0\"], ", "", 19, "`dhchap-controller`", "the host has no `dhchap`"),
        ("dhchap = [\"c3\"], ", "", 23, "`authentication`", "nqn.2026-01.a:three has no `dhchap`"),
        (
            "psk = [\"p3\"], ",
            "pks = [\"p3\"], ",
            21,
            "",
            "unknown field `pks`, expected one of `nqn`",
        ),
        ("read-only = true", "read-only = 7", 21, "", "expected true, false, or a list"),
        ("read-only = [2]", "read-only = [3]", 20, "`read-only`", "no namespace 3"),
        ("read-only = [2]", "read-only = [0]", 20, "`read-only`", "0, expected identifiers from 1"),
        ("connections = 8", "connections = 0", 20, "`connections`", "0, expected 1 to 65536"),
        ("\"16m\"", "\"1m\"", 20, "`buffer-memory`", "'1m', expected at least 4m"),
        (two, "\"nqn.2026-01.a:one\"", 20, "`allowed-hosts`", "'nqn.2026-01.a:one' is named twice"),
        (two, "\"nqn.2026-01.a:two\"", 23, "`authentication`", "nqn.2026-01.a:two has no `dhchap`"),
        (two, "7", 20, "", "expected a host NQN, or a table"),
        ("nqn = \"nqn.2026-01.a:three\"", "nqn = \"a b\"", 21, "`nqn`", "'a b': NQN holds ' '"),
        (
            "\"sha512\", ",
            "\"md5\", ",
            26,
            "`dhchap-hashes`",
            "'md5', expected one of sha256, sha384",
        ),
        ("\"sha512\", ", "\"sha256\", ", 26, "`dhchap-hashes`", "'sha256' is named twice"),
        (
            "\"ffdhe4096\"",
            "\"modp\"",
            27,
            "`dhchap-groups`",
            "'modp', expected one of null, ffdhe2048",
        ),
        ("\"refused\"", "\"no\"", 28, "`concatenation`", "'no', expected one of refused, allowed"),
        ("tls = \"allowed\"", "", 24, "`secure-channel`", "listener 127.0.0.1:4420 has no TLS"),
    ];
    for (found, by, line, key, problem) in rows {
        let said = error_after_replacing(found, by);
        assert!(said.line == line && said.key.contains(key), "{found} by {by}: {said}");
        assert!(said.problem.contains(problem), "{found} by {by}: {said}");
    }
}

#[test]
fn file_with_which_no_host_could_connect_is_rejected() {
    let edit = |edits: &[(&str, &str)]| {
        let text = edits.iter().fold(WHOLE.to_owned(), |text, (found, by)| {
            assert!(text.contains(found), "{found}");
            text.replace(found, by)
        });
        TargetConfig::parse(&text)
    };
    let relaxed = ("secure-channel = \"required\"", "secure-channel = \"optional\"");
    let plain = [("tls = \"required\"", ""), ("tls = \"allowed\"", "tls = \"off\""), relaxed];
    let refused = edit(&plain).unwrap_err().to_string();
    assert!(refused.contains("line 19, `psk`: no listener of the subsystem has TLS"), "{refused}");
    let all_tls = ("tls = \"allowed\"", "tls = \"required\"");
    edit(&[all_tls]).unwrap();
    let refused = edit(&[all_tls, ("psk = [\"p2\"], ", "")]).unwrap_err().to_string();
    assert!(refused.contains("nqn.2026-01.a:two has no `psk`, and each listener"), "{refused}");
    // Where a listener permits plaintext, such a host can generate a key.
    edit(&[("psk = [\"p2\"], ", "")]).unwrap();
    let none = ("dhchap = [\"c", "psk = [\"c");
    let refused = edit(&[none, ("authentication = \"required\"\nsecure", "secure")]);
    assert!(refused.is_err());
    let discovery = (
        "[discovery]\nauthentication = \"required\"",
        "[discovery]\nallowed-hosts = [\"nqn.2026-01.b\"]",
    );
    let refused = edit(&[discovery]).unwrap_err().to_string();
    assert!(
        refused.contains("line 14, `allowed-hosts`: the host has no key, and discovery is open"),
        "{refused}"
    );
}

#[test]
fn key_in_place_of_its_name_is_rejected_without_repeating_it() {
    let psk = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
    let secret = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
    for (found, by, line) in [
        ("\"p1\"", format!("\"{psk}\""), 19),
        ("\"ram:1m\"", format!("\"tcp://h/nqn.a/1?dhchap={secret}\""), 32),
        ("\"null:\"", psk.to_owned(), 35),
        ("\nkeyring", format!("# {secret}\nkeyring"), 1),
    ] {
        let said = error_after_replacing(found, &by);
        assert_eq!((said.line, said.key.as_str()), (line, "the file"), "{said}");
        assert!(said.problem.contains("it holds a key, expected the name of one"), "{said}");
        assert!(!format!("{said} {said:?}").contains("VRLb") && !said.to_string().contains("ia6z"));
    }
}

#[test]
fn keys_of_the_kernel_are_those_of_the_host_and_the_subsystem() {
    const NQN: &str = "nqn.2026-01.org.example:disks";
    let text = WHOLE.replace("[\"p1\", \"p0\"]", "[\"p1\", \".nvme\"]");
    let read = TargetConfig::parse(&text).unwrap();
    assert!(read.names_keys() && read.kernel_psks_line().is_some());
    let hosts = [&read.subsystems[0].security, &read.discovery].map(|one| &one.hosts[0]);
    for host in hosts {
        assert_eq!(host.psk_names().collect::<Vec<_>>(), ["p1", ".nvme"]);
        assert_eq!(host.kernel_psks.unwrap().0, 19);
    }
    // It is no key of the keyring, and no secret of DH-HMAC-CHAP.
    let only = |by: &str| {
        format!(
            "[[listener]]\naddress = \"127.0.0.1:1\"\ntls = \"required\"\n[[subsystem]]\nnqn = \"{NQN}\"\n\
             allowed-hosts = [{{ nqn = \"nqn.2026-01.a:one\", {by} }}]\n[[subsystem.namespace]]\nuri = \"null:\""
        )
    };
    let read = TargetConfig::parse(&only("psk = [\".nvme\"]")).unwrap();
    assert!(!read.names_keys() && read.kernel_psks_line().is_some());
    let refused =
        TargetConfig::parse(&only("psk = [\".nvme\"], dhchap = [\".nvme\"]")).unwrap_err();
    assert_eq!((refused.line, refused.key.as_str()), (6, "`dhchap`"));
    let security = &read.subsystems[0].security;
    let refused = security.read_keys(KeySources::default(), Some(NQN)).unwrap_err();
    assert_eq!((refused.line.0, refused.key), (6, "psk"));
    assert!(refused.error.text.contains("keyring .nvme of the kernel is not open"));

    let kernel = match KernelPsks::create_for_process("tenmil-configuration-test") {
        Ok(kernel) => kernel,
        Err(why) => return println!("skipped: {why}"),
    };
    let sources = KeySources { keyring: None, kernel: Some(&kernel) };
    let refused = security.read_keys(sources, Some(NQN)).unwrap_err();
    assert_eq!((refused.line.0, refused.key), (6, "psk"));
    assert!(refused.error.text.contains(NQN), "{}", refused.error.text);
    let key = Key::generate(KeyKind::Psk, KeyHash::None, None).unwrap();
    let of = |subsystem: &str| key.tls_psks("nqn.2026-01.a:one", subsystem).remove(0);
    let discovery = "nqn.2014-08.org.nvmexpress.discovery";
    // Discovery does without.
    let found = security.read_keys(sources, None).unwrap();
    assert_eq!(found.hosts["nqn.2026-01.a:one"].tls_psks, []);
    for subsystem in [NQN, discovery] {
        kernel.insert(&of(subsystem)).unwrap();
    }
    let found = security.read_keys(sources, Some(NQN)).unwrap();
    assert_eq!(found.hosts["nqn.2026-01.a:one"].tls_psks, [of(NQN)]);
    assert_eq!(found.hosts["nqn.2026-01.a:one"].psks, []);
    let found = security.read_keys(sources, None).unwrap();
    assert!(found.hosts["nqn.2026-01.a:one"].tls_psks.contains(&of(discovery)));
}

#[test]
fn keys_are_read_from_the_keyring_and_a_missing_one_is_named_with_its_line() {
    let root = tempfile::tempdir().unwrap();
    let keyring = Keyring::open_or_create(Some(&root.path().join("keys"))).unwrap();
    let make = |name: &str| {
        let kind = if name.starts_with('c') { KeyKind::Dhchap } else { KeyKind::Psk };
        let key = Key::generate(kind, KeyHash::None, None).unwrap();
        keyring.store(&name.parse().unwrap(), &key, Overwrite::Replace).unwrap();
        key
    };
    let keys: Vec<_> = ["c0", "c1", "c2", "c3", "cc", "p0", "p1", "p2", "p3"].map(make).into();
    let security = TargetConfig::parse(WHOLE).unwrap().subsystems.remove(0).security;
    let read_keys = |keyring| {
        let sources = KeySources { keyring, kernel: None };
        security.read_keys(sources, Some("nqn.2026-01.org.example:disks"))
    };
    let read = read_keys(Some(&keyring)).unwrap();
    let one = &read.hosts["nqn.2026-01.a:one"];
    let named = |name: &str, key: &Key| (name.to_owned(), key.clone());
    let secret = |one: NamedKey<ChapSecret>| (one.name, Key::Dhchap(one.key));
    let secrets: Vec<_> = one.chap_secrets.iter().cloned().map(secret).collect();
    let in_order_of_file = [named("c1", &keys[1]), named("c0", &keys[0])];
    assert_eq!(secrets, in_order_of_file);
    assert_eq!(one.controller_secret.clone().map(secret), Some(named("cc", &keys[4])));
    let psk = |one: NamedKey<ConfiguredPsk>| (one.name, Key::Psk(one.key));
    let psks: Vec<_> = one.psks.iter().cloned().map(psk).collect();
    assert_eq!(psks, [named("p1", &keys[6]), named("p0", &keys[5])]);
    assert_eq!((read.hosts.len(), read.rights.len()), (3, 2));
    assert!(read.authentication_required && read.secure_channel_required);
    // A changed file is the key from then on.
    let changed = make("p1");
    assert_ne!(read_keys(Some(&keyring)).unwrap(), read);
    assert_ne!(changed, keys[6]);
    make("c2");
    keyring.remove(&"p2".parse().unwrap()).unwrap();
    let refused = read_keys(Some(&keyring)).unwrap_err();
    assert_eq!((refused.line.0, refused.key), (20, "psk"));
    let directory = keyring.path().display().to_string();
    assert!(refused.error.text.contains(&format!("key `p2`: keyring {directory} has none")));
    assert!(refused.error.hint().unwrap().contains("tenmil key import p2 --keyring"));
    let refused = read_keys(None).unwrap_err();
    assert!(refused.error.text.contains("no keyring is open"), "{:?}", refused.error);
    // A secret in place of a PSK.
    let key = Key::generate(KeyKind::Dhchap, KeyHash::None, None).unwrap();
    keyring.store(&"p2".parse().unwrap(), &key, Overwrite::Refuse).unwrap();
    let refused = read_keys(Some(&keyring)).unwrap_err();
    assert!(refused.error.text.contains("found a DH-HMAC-CHAP secret, expected a TLS PSK"));
}

#[test]
fn configuration_example_in_the_documentation_is_valid() {
    let document = include_str!("../../../../docs/operator/tls-and-authentication.md");
    let file = document.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let read = TargetConfig::parse(file).unwrap();
    let subsystem = &read.subsystems[0];
    assert_eq!((subsystem.security.hosts.len(), read.discovery.hosts.len()), (2, 2));
    assert!(read.discovery.authentication_required && subsystem.security.secure_channel_required);
}
