//! Tests of the keyring.
#![allow(clippy::disallowed_methods, reason = "a test writes files of its own")]

mod nvme_cli;

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use tenmil_base::{Error, ErrorCategory};
use tenmil_linux::secret_memory::secret_memory_state;
use tenmil_nvme_auth::{
    ConfiguredPsk, Derivation, Hash, IdentityVersion, KeyHash, KeySource, SecretBytes, TlsPsk,
    generated_tls_psk, tls_psk_candidates,
};

use crate::{
    KernelPsks, Key, KeyKind, KeyName, Keyring, KeyringAtPath, KeyringError, Overwrite,
    contains_key_text, key_of_input,
};

/// Key of the specification's example, and of libnvme's tests.
const PSK: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
const SECRET: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";

const ALL_HASHES: [KeyHash; 4] = [
    KeyHash::None,
    KeyHash::Transform(Hash::Sha256),
    KeyHash::Transform(Hash::Sha384),
    KeyHash::Transform(Hash::Sha512),
];

fn keyring() -> (tempfile::TempDir, Keyring) {
    let root = tempfile::tempdir().unwrap();
    let keyring = Keyring::open_or_create(Some(&root.path().join("keys"))).unwrap();
    (root, keyring)
}

fn name(text: &str) -> KeyName {
    text.parse().unwrap()
}

fn key(text: &str) -> Key {
    Key::parse("test", text).unwrap()
}

/// Text, hint and `Debug` output of an error, without anything of a key.
fn text(error: KeyringError) -> String {
    let debug = format!("{error:?}");
    let error = Error::from(error);
    let text = format!("{error}; hint: {}", error.hint().unwrap_or_default());
    for secret in ["VRLbtnN9", "ia6zGodO", "BASE64SECRET"] {
        assert!(!text.contains(secret) && !debug.contains(secret), "{text} {debug}");
    }
    text
}

#[test]
fn stored_keys_are_read_listed_and_removed() {
    let (_root, keyring) = keyring();
    keyring.store(&name("db-host"), &key(PSK), Overwrite::Refuse).unwrap();
    keyring.store(&name("db.chap"), &key(SECRET), Overwrite::Refuse).unwrap();
    assert_eq!(keyring.key(&name("db-host")).unwrap(), key(PSK));
    assert_eq!(Key::Psk(keyring.psk(&name("db-host")).unwrap()), key(PSK));
    assert_eq!(Key::Dhchap(keyring.chap_secret(&name("db.chap")).unwrap()), key(SECRET));
    // What others see in the file.
    let file = std::fs::read_to_string(keyring.path_of(&name("db-host"))).unwrap();
    assert_eq!(file, format!("{PSK}\n"));
    let entries = keyring.entries().unwrap();
    let shown: Vec<_> = entries
        .iter()
        .map(|entry| {
            let key = entry.key.as_ref().unwrap();
            assert!(entry.modified.is_some_and(|time| time.unix_us > 1_700_000_000_000_000));
            (entry.name.as_str(), key.kind().name(), key.hash().id(), key.len_bytes())
        })
        .collect();
    assert_eq!(shown, [("db-host", "psk", 1, 32), ("db.chap", "dhchap", 0, 32)]);
    keyring.remove(&name("db-host")).unwrap();
    assert!(text(keyring.remove(&name("db-host")).unwrap_err()).contains("expected db.chap"));
}

#[test]
fn key_written_by_hand_may_have_white_space_around_it() {
    let (_root, keyring) = keyring();
    let path = keyring.path_of(&name("a"));
    for written in [PSK.to_owned(), format!("  {PSK}\r\n"), format!("\n{PSK}\n\n")] {
        std::fs::write(&path, written).unwrap();
        set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(keyring.key(&name("a")).unwrap(), key(PSK));
    }
}

#[test]
fn file_that_is_no_key_is_refused_without_its_content() {
    let (_root, keyring) = keyring();
    let path = keyring.path_of(&name("a"));
    for (content, expected) in [
        ("", "/keys/a: found 0 lines, expected one with a key"),
        (&format!("{PSK}\n{SECRET}"), "/keys/a: found 2 lines, expected one"),
        ("BASE64SECRET", "/keys/a: found another text, expected NVMeTLSkey-1:… or DHHC-1:…"),
        ("DHHC-1:00:BASE64SECRET:", "/keys/a: parse DHHC-1 key: "),
        (&PSK.replace("Nf9L", "Nf8L"), "/keys/a: parse NVMeTLSkey-1 key: found CRC"),
        (&"BASE64SECRET".repeat(30), "found 360 bytes, expected a key of at most 255"),
        ("\u{e9}BASE64SECRET", "found another text"),
    ] {
        std::fs::write(&path, content).unwrap();
        set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let refused = text(keyring.key(&name("a")).unwrap_err());
        assert!(refused.contains(expected), "{refused}");
        // A listing shows the problem and the other keys.
        keyring.store(&name("b"), &key(PSK), Overwrite::Replace).unwrap();
        let mut entries = keyring.entries().unwrap();
        assert!(entries.remove(1).key.is_ok());
        assert!(text(entries.remove(0).key.unwrap_err()).contains(expected));
    }
    std::fs::write(&path, b"\xff\xfe").unwrap();
    assert!(text(keyring.key(&name("a")).unwrap_err()).contains("found another text"));
}

#[test]
fn unknown_name_or_kind_is_refused_with_the_directory_and_the_command() {
    let (root, keyring) = keyring();
    let shown = root.path().join("keys").display().to_string();
    let refused = text(keyring.psk(&name("db")).unwrap_err());
    let expected =
        format!("key `db`: keyring {shown} has none of that name, expected one, and it is");
    assert!(refused.contains(&expected), "{refused}");
    assert!(
        refused.contains(&format!("`tenmil key import db --keyring {shown} < FILE`")),
        "{refused}"
    );
    for index in 0..10 {
        keyring.store(&name(&format!("k{index}")), &key(PSK), Overwrite::Refuse).unwrap();
    }
    let error = keyring.chap_secret(&name("db")).unwrap_err();
    assert!(
        error.to_string().ends_with("expected one of k0, k1, k2, k3, k4, k5, k6, k7 and 2 more")
    );
    let refused = text(keyring.chap_secret(&name("k0")).unwrap_err());
    assert!(
        refused.contains("keys/k0: found a TLS PSK, expected a DH-HMAC-CHAP secret")
            && refused.contains("tenmil key generate dhchap"),
        "{refused}"
    );
    keyring.store(&name("k0"), &key(SECRET), Overwrite::Replace).unwrap();
    let refused = text(keyring.psk(&name("k0")).unwrap_err());
    assert!(refused.contains("found a DH-HMAC-CHAP secret, expected a TLS PSK"), "{refused}");
    let error = Error::from(Keyring::open(Some(&root.path().join("none"))).unwrap_err());
    assert_eq!(error.category(), ErrorCategory::Environment);
    assert!(error.hint().unwrap().contains("tenmil key generate psk NAME --keyring"), "{error:?}");
}

#[test]
fn name_leads_out_of_the_directory_in_no_case_and_is_not_repeated() {
    for (found, expected) in [
        ("", "an empty name"),
        ("../db", "'/' in it"),
        ("..", "'.' at its start"),
        (".hidden", "'.' at its start"),
        ("-f", "'-' at its start"),
        ("a b", "' ' in it"),
        ("a\0b", "' in it"),
        ("sch\u{fc}ssel", "'\u{fc}' in it"),
        (PSK, "found a key, expected"),
        (&format!("x{SECRET}"), "found a key, expected"),
        (&"a".repeat(65), "found 65 bytes"),
    ] {
        let refused = text(found.parse::<KeyName>().unwrap_err());
        assert!(refused.contains(expected), "{refused}");
    }
    assert_eq!(name("A.b_c-1").as_str(), "A.b_c-1");
    assert!(contains_key_text("tcp://h/n/1?key=DHHC-1:00:") && !contains_key_text("DHHC-1"));
}

#[test]
fn file_or_directory_that_others_control_is_refused() {
    let (root, keyring) = keyring();
    keyring.store(&name("a"), &key(PSK), Overwrite::Refuse).unwrap();
    set_permissions(keyring.path_of(&name("a")), Permissions::from_mode(0o640)).unwrap();
    let refused = text(keyring.key(&name("a")).unwrap_err());
    assert!(refused.contains("its mode is 0640") && refused.contains("`chmod 600 "), "{refused}");
    symlink(keyring.path_of(&name("a")), keyring.path_of(&name("b"))).unwrap();
    let refused = text(keyring.key(&name("b")).unwrap_err());
    assert!(refused.contains("found a symbolic link"), "{refused}");
    set_permissions(root.path().join("keys"), Permissions::from_mode(0o750)).unwrap();
    let refused = text(Keyring::open(Some(keyring.path())).unwrap_err());
    assert!(refused.contains("its mode is 0750") && refused.contains("`chmod 700 "), "{refused}");
}

#[test]
fn host_finds_the_text_of_a_key_by_its_name() {
    let (root, keyring) = keyring();
    keyring.store(&name("a"), &key(PSK), Overwrite::Refuse).unwrap();
    let lazy = KeyringAtPath { path: Some(keyring.path().into()) };
    for source in [&keyring as &dyn KeySource, &lazy] {
        assert_eq!(source.find_key("a").unwrap().psk().map(Key::Psk), Ok(key(PSK)));
        assert!(source.find_key("b").unwrap_err().text.contains("expected a"));
        let refused = source.find_key(SECRET).unwrap_err();
        assert!(refused.text.contains("found a key") && !refused.text.contains("ia6z"));
    }
    let none = KeyringAtPath { path: Some(root.path().join("none")) };
    assert!(none.find_key("a").unwrap_err().hint().unwrap().contains("tenmil key generate"));
}

#[test]
fn generated_keys_have_the_length_of_their_hash_and_differ() {
    for kind in KeyKind::ALL {
        for hash in ALL_HASHES {
            if (kind, hash) == (KeyKind::Psk, KeyHash::Transform(Hash::Sha512)) {
                assert!(Key::generate(kind, hash, None).is_err());
                continue;
            }
            let [one, other] = [(); 2].map(|()| Key::generate(kind, hash, None).unwrap());
            let len = hash.hash().map_or(32, Hash::len_bytes);
            assert_eq!((one.len_bytes(), one.hash(), one.kind()), (len, hash, kind));
            assert_ne!(one, other);
            assert_eq!(Key::parse("test", &one.to_text()).unwrap(), one);
        }
    }
    let long = Key::generate(KeyKind::Dhchap, KeyHash::None, Some(64)).unwrap();
    assert_eq!(long.len_bytes(), 64);
    let refused = text(Key::generate(KeyKind::Psk, ALL_HASHES[1], Some(48)).unwrap_err());
    assert!(refused.contains("found 48 bytes, expected 32 bytes for hash 01"), "{refused}");
}

#[test]
fn identities_of_a_key_are_those_of_libnvme() {
    // libnvme/test/psk.c: version 1 has a digest of the key, version 0 has none.
    let psks = key(PSK).tls_psks("nqn.psk-test-host", "nqn.psk-test-subsys");
    let identities: Vec<_> = psks.iter().map(|psk| psk.identity.as_str()).collect();
    assert_eq!(identities.len(), 4);
    assert_eq!(
        identities[0],
        "NVMe1R01 nqn.psk-test-host nqn.psk-test-subsys iSbjiStwJ/1TrTvDlt2fjFmzvsytOJelidNnA+X5lEU="
    );
    assert!(
        identities[2..].iter().all(|one| *one == "NVMe0R01 nqn.psk-test-host nqn.psk-test-subsys")
    );
    assert!(key(SECRET).tls_psks("h", "s").is_empty());
}

#[test]
fn key_is_read_from_input_up_to_its_limit() {
    let read = |input: &[u8]| key_of_input("standard input", &mut &*input);
    assert_eq!(read(format!("{PSK}\n").as_bytes()).unwrap(), key(PSK));
    let refused = text(read(&[b'a'; 10_000]).unwrap_err());
    assert!(refused.contains("standard input: more than 255 bytes"), "{refused}");
    assert!(text(read(b"\xff").unwrap_err()).contains("standard input: found another text"));
}

#[test]
fn secrets_of_a_keyring_lie_in_protected_memory() {
    let (_root, keyring) = keyring();
    keyring.store(&name("a"), &key(PSK), Overwrite::Refuse).unwrap();
    let one = keyring.key(&name("a")).unwrap();
    let psks = tls_psk_candidates(&[keyring.psk(&name("a")).unwrap()], "h", "s");
    // Other tests of this process have secrets, too.
    let state = secret_memory_state();
    assert!(state.buffers > psks.len() && state.dumped.is_none(), "{state:?}");
    assert!(format!("{one:?}").contains("SecretBytes(32 bytes)"));
}

#[test]
fn tls_psks_are_kept_in_a_keyring_of_the_kernel() {
    let psks = match KernelPsks::create_for_process("tenmil-keyring-test") {
        Ok(psks) => psks,
        Err(why) => return println!("skipped: {why}"),
    };
    let wanted = key(PSK).tls_psks("nqn.host", "nqn.sub").remove(0);
    let inserted = psks.insert(&wanted).unwrap();
    assert_eq!(psks.insert(&wanted).unwrap(), inserted, "replaced");
    assert_eq!(psks.psks().unwrap(), std::slice::from_ref(&inserted));
    let found = psks.find(&wanted.identity).unwrap().unwrap();
    assert_eq!((found.serial(), found.identity()), (inserted.serial(), wanted.identity.as_str()));
    assert_eq!(psks.read(&found).unwrap(), wanted.key);
    psks.revoke(&found).unwrap();
    assert_eq!(psks.find(&wanted.identity).unwrap(), None);
}

#[test]
fn tls_psks_of_the_kernel_are_those_of_host_and_subsystem_in_the_order_of_linux() {
    let psks = match KernelPsks::create_for_process("tenmil-keyring-order") {
        Ok(psks) => psks,
        Err(why) => return println!("skipped: {why}"),
    };
    let (host, subsystem) = ("nqn.host", "nqn.sub");
    let key = |len: u8| SecretBytes::new((0..len).collect());
    let configured = |len| ConfiguredPsk::generate(KeyHash::None, key(len)).unwrap();
    let expected: Vec<_> = tls_psk_candidates(&[configured(32), configured(48)], host, subsystem)
        .into_iter()
        .filter(|psk| psk.derivation == Derivation::Specification)
        .collect();
    assert_eq!(expected.len(), 4);
    let of_others = [
        tls_psk_candidates(&[configured(32)], host, "nqn.sub2").remove(0),
        tls_psk_candidates(&[configured(32)], "nqn.host2", subsystem).remove(0),
        tls_psk_candidates(&[configured(32)], subsystem, host).remove(0),
        generated_tls_psk(&key(32), Hash::Sha256, IdentityVersion::One, host, subsystem).unwrap(),
        TlsPsk { identity: format!("{host} {subsystem}"), ..expected[0].clone() },
    ];
    for psk in of_others.iter().chain(expected.iter().rev()) {
        psks.insert(psk).unwrap();
    }
    assert_eq!(psks.tls_psks(host, Some(subsystem)).unwrap(), expected);
    // The discovery service has keys of all subsystems.
    let of_host = psks.tls_psks(host, None).unwrap();
    assert_eq!(of_host.len(), 5);
    assert!(of_host.contains(&of_others[0]));
    assert_eq!(psks.tls_psks("nqn.absent", None).unwrap(), []);
    let refused = text(psks.tls_psks(host, Some("nqn.absent")).unwrap_err());
    assert!(refused.contains("has none of host nqn.host and subsystem nqn.absent"), "{refused}");
    assert!(refused.contains("tenmil key insert NAME --hostnqn nqn.host"), "{refused}");
    // A revoked key is none, and one of another length is an error that names it.
    psks.revoke(&psks.find(&expected[0].identity).unwrap().unwrap()).unwrap();
    assert_eq!(psks.tls_psks(host, Some(subsystem)).unwrap(), expected[1..]);
    psks.insert(&TlsPsk { key: key(48), ..expected[1].clone() }).unwrap();
    let refused = text(psks.tls_psks(host, Some(subsystem)).unwrap_err());
    assert!(refused.contains("found 48 bytes, expected 32"), "{refused}");
    assert!(refused.contains(&expected[1].identity), "{refused}");
}

#[test]
fn kernel_without_nvme_keyring_is_named_with_the_module() {
    match KernelPsks::open() {
        Ok(_) => println!("skipped: this kernel has the keyring .nvme"),
        Err(error) => {
            let refused = text(error);
            assert!(refused.contains(".nvme") || refused.contains("no keyrings"), "{refused}");
            assert!(refused.contains("modprobe nvme_tcp") || refused.contains("CONFIG_KEYS"));
        }
    }
}

#[test]
fn directory_follows_from_the_environment() {
    // The variables of a test are those of the process, so only the present ones are examined.
    let expected = match (std::env::var_os("TENMIL_KEYRING"), std::env::var_os("XDG_CONFIG_HOME")) {
        (Some(path), _) => PathBuf::from(path),
        _ if tenmil_linux::runtime_directory::current_uid() == 0 => "/etc/tenmil/keys".into(),
        (None, Some(path)) => PathBuf::from(path).join("tenmil/keys"),
        (None, None) => {
            PathBuf::from(std::env::var_os("HOME").unwrap()).join(".config/tenmil/keys")
        }
    };
    assert_eq!(crate::default_path().unwrap(), expected);
}
