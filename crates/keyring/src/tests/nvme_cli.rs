//! nvme-cli as a reference: it accepts our keys, and we accept those that it generates. Skipped where
//! it is not installed.

use std::process::Command;

use tenmil_nvme_auth::{Hash, KeyHash};

use super::ALL_HASHES;
use crate::{Key, KeyKind};

/// Output of `nvme`, and whether it succeeded; `None` if it is not installed.
fn nvme(arguments: &[&str]) -> Option<(bool, String)> {
    let output = Command::new("nvme").args(arguments).output();
    let output = output.inspect_err(|why| println!("skipped: nvme-cli: {why}")).ok()?;
    let text = [output.stdout, output.stderr].concat();
    Some((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
}

/// Keys of a kind with each hash and length.
fn variants(kind: KeyKind) -> Vec<(KeyHash, Option<usize>)> {
    let mut variants: Vec<_> = ALL_HASHES.iter().map(|hash| (*hash, None)).collect();
    match kind {
        // nvme-cli 2.3 refuses PSKs without a hash, which the specification permits.
        KeyKind::Psk => variants
            .retain(|(hash, _)| !matches!(hash, KeyHash::None | KeyHash::Transform(Hash::Sha512))),
        KeyKind::Dhchap => variants.extend([(KeyHash::None, Some(48)), (KeyHash::None, Some(64))]),
    }
    variants
}

#[test]
fn nvme_cli_accepts_generated_keys_and_refuses_altered_ones() {
    for (kind, command) in [(KeyKind::Psk, "check-tls-key"), (KeyKind::Dhchap, "check-dhchap-key")]
    {
        for (hash, len_bytes) in variants(kind) {
            let key = Key::generate(kind, hash, len_bytes).unwrap();
            let text = key.to_text();
            let Some((is_accepted, said)) = nvme(&[command, "--key", &text]) else { return };
            assert!(is_accepted, "{kind:?} {hash:?} {len_bytes:?}: {said}");
            // One character of the key is another one.
            let at = text.len() - 20;
            let other = if &text[at..=at] == "A" { "B" } else { "A" };
            let mut altered = text.to_string();
            altered.replace_range(at..=at, other);
            let (is_accepted, said) = nvme(&[command, "--key", &altered]).unwrap();
            assert!(!is_accepted, "{kind:?} {hash:?}: {said}");
        }
    }
}

#[test]
fn keys_of_nvme_cli_are_parsed() {
    let nqn = "nqn.2014-08.org.nvmexpress:uuid:4b0c28c5-5b0d-4d4f-8f4c-8e0c2e3a1d11";
    for (hash, hmac) in ALL_HASHES.into_iter().zip(["0", "1", "2", "3"]) {
        let generated = nvme(&["gen-dhchap-key", "--hmac", hmac, "--nqn", nqn]);
        let Some((is_generated, said)) = generated else { return };
        assert!(is_generated, "{said}");
        let key = Key::parse("test", &said).unwrap();
        assert_eq!((key.kind(), key.hash()), (KeyKind::Dhchap, hash));
        if matches!(hash, KeyHash::Transform(Hash::Sha256 | Hash::Sha384)) {
            let (is_generated, said) = nvme(&["gen-tls-key", "--hmac", hmac]).unwrap();
            assert!(is_generated, "{said}");
            let key = Key::parse("test", &said).unwrap();
            assert_eq!((key.kind(), key.hash()), (KeyKind::Psk, hash));
        }
    }
}
