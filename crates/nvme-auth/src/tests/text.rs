//! Text forms of keys: what is refused, and how that reads.

use proptest::prelude::*;

use super::random_bytes;
use crate::{ChapSecret, ConfiguredPsk, Hash, KeyError, KeyHash, SecretBytes};

const PSK: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";

/// Example of the specification. Linux accepts it with each hash.
const SECRET: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";

const HASHES: [KeyHash; 4] = [
    KeyHash::None,
    KeyHash::Transform(Hash::Sha256),
    KeyHash::Transform(Hash::Sha384),
    KeyHash::Transform(Hash::Sha512),
];

fn psk_error(text: &str) -> String {
    ConfiguredPsk::parse(text).unwrap_err().to_string()
}

#[test]
fn malformed_key_is_refused_with_what_was_found_and_expected() {
    for (text, error) in [
        ("", "parse key: found another prefix, expected NVMeTLSkey-1:HH:BASE64:"),
        (SECRET, "parse key: found a DHHC-1 key, expected NVMeTLSkey-1:HH:BASE64:"),
        (
            "NVMeTLSkey-1:01:AAAA",
            "parse NVMeTLSkey-1 key: found 2 colons, expected 3, one at the end",
        ),
        (
            "NVMeTLSkey-1:01:AAAA:\n",
            "parse NVMeTLSkey-1 key: found 3 colons, expected 3, one at the end",
        ),
        ("NVMeTLSkey-1:03:AAAA:", "parse NVMeTLSkey-1 key: found hash 03, expected 00 to 02"),
        (
            "NVMeTLSkey-1:+1:AAAA:",
            "parse NVMeTLSkey-1 key: hash is not two digits, expected 00 to 02",
        ),
        (
            "NVMeTLSkey-1:1:AAAA:",
            "parse NVMeTLSkey-1 key: hash is not two digits, expected 00 to 02",
        ),
        (
            "NVMeTLSkey-1:01:AAA*:",
            "parse NVMeTLSkey-1 key: its 4 characters are not base64 with padding",
        ),
        (
            "NVMeTLSkey-1:01:AAAA:",
            "parse NVMeTLSkey-1 key: its 4 characters are not base64 with padding",
        ),
        (
            "NVMeTLSkey-1:01:AAAAAA==:",
            "parse NVMeTLSkey-1 key: found 0 bytes, expected 32 bytes for hash 01",
        ),
        (
            &PSK.replace("VRLb", "VRLc"),
            "parse NVMeTLSkey-1 key: found CRC d9baf45f, expected that of the key",
        ),
        (
            &PSK.replace(":01:", ":02:"),
            "parse NVMeTLSkey-1 key: found 32 bytes, expected 48 bytes for hash 02",
        ),
    ] {
        assert_eq!(psk_error(text), error, "{text}");
    }
    let error = ChapSecret::parse(&SECRET.replace(":00:", ":04:")).unwrap_err();
    assert_eq!(error, KeyError::Hash { kind: "DHHC-1", found: Some(4), max: 3 });
    assert_eq!(
        ChapSecret::parse(PSK).unwrap_err().to_string().split(':').nth(1),
        Some(" found a NVMeTLSkey-1 key, expected DHHC-1")
    );
}

#[test]
fn key_has_a_length_that_its_hash_permits() {
    for transform in HASHES {
        for len in [0, 16, 31, 32, 33, 48, 64, 65] {
            let bytes = || SecretBytes::new(random_bytes(7, len));
            let fits = transform.hash().is_none_or(|hash| hash.len_bytes() == len);
            let is_psk = fits && matches!(len, 32 | 48) && transform.id() < 3;
            let is_secret = fits && matches!(len, 32 | 48 | 64);
            assert_eq!(ConfiguredPsk::generate(transform, bytes()).is_ok(), is_psk);
            assert_eq!(ChapSecret::generate(transform, bytes()).is_ok(), is_secret);
        }
    }
}

#[test]
fn generated_keys_survive_their_text_form() {
    for (transform, len) in HASHES.into_iter().zip([48, 32, 48, 64]) {
        let bytes = || SecretBytes::new(random_bytes(9, len));
        let secret = ChapSecret::generate(transform, bytes()).unwrap();
        let text = secret.to_text();
        assert!(text.starts_with(&format!("DHHC-1:{:02}:", transform.id())) && text.ends_with(':'));
        assert_eq!(ChapSecret::parse(&text).unwrap(), secret);
        if let Ok(psk) = ConfiguredPsk::generate(transform, bytes()) {
            let text = psk.to_text();
            // Lengths of the interchange format: 65 and 89 characters (TCP 1.1 §3.6.1.5).
            assert_eq!(text.len(), if len == 32 { 65 } else { 89 });
            assert_eq!(ConfiguredPsk::parse(&text).unwrap(), psk);
        }
    }
}

#[test]
fn example_of_the_specification_is_accepted_with_each_hash() {
    let secret = ChapSecret::parse(SECRET).unwrap();
    assert_eq!(secret.to_text().as_str(), SECRET);
    assert_eq!(secret.response_key("a"), secret.response_key("b"));
    for hash in Hash::ALL {
        let text = SECRET.replace(":00:", &format!(":{:02}:", hash.id()));
        let transformed = ChapSecret::parse(&text).unwrap();
        assert_eq!(transformed.response_key("a").len(), hash.len_bytes());
        assert_ne!(transformed.response_key("a"), transformed.response_key("b"));
    }
}

/// The CRC detects each change of one character of the key.
#[test]
fn every_changed_character_is_refused() {
    for at in 0..PSK.len() {
        for replacement in ["A", "b", "7", "+", ":", "=", " "] {
            let mut text = PSK.to_owned();
            text.replace_range(at..=at, replacement);
            let unchanged = text == PSK;
            let other_hash = text.starts_with("NVMeTLSkey-1:00:");
            assert!(unchanged || other_hash || ConfiguredPsk::parse(&text).is_err(), "{text}");
        }
    }
}

proptest! {
    #[test]
    fn any_text_is_parsed_without_panic(text in "(NVMeTLSkey-1|DHHC-1)?:?[0-9a-f]{0,3}:?.{0,80}:?") {
        let _ = ConfiguredPsk::parse(&text);
        let _ = ChapSecret::parse(&text);
    }
}
