//! Removal of secrets from the texts of a support bundle.

/// Beginnings of keys: TLS PSKs and DH-HMAC-CHAP secrets in their interchange formats.
const KEY_PREFIXES: [&str; 2] = ["NVMeTLSkey-1:", "DHHC-1:"];
const REMOVED_KEY: &str = "[key removed]";
const REMOVED_OPTIONS: &str = "?[options removed]";

/// The text without keys, without the options of device URIs and without passwords of URLs.
///
/// Keys have no place in what the bundle is made of; if one is there nevertheless, for example in a log of
/// another program, it is removed to its end.
pub(super) fn redact(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for word in text.split_inclusive(is_separator) {
        let (body, separator) = match word.chars().next_back().filter(|c| is_separator(*c)) {
            Some(last) => word.split_at(word.len() - last.len_utf8()),
            None => (word, ""),
        };
        redact_word(body, &mut clean);
        clean.push_str(separator);
    }
    clean
}

fn redact_word(word: &str, clean: &mut String) {
    if let Some(at) = KEY_PREFIXES.iter().filter_map(|prefix| word.find(prefix)).min() {
        clean.push_str(&word[..at]);
        clean.push_str(REMOVED_KEY);
        return;
    }
    let (place, has_options) = match word.split_once('?') {
        Some((place, options)) if has_scheme(place) && !options.is_empty() => (place, true),
        _ => (word, false),
    };
    match place.split_once("://").and_then(|(scheme, rest)| Some((scheme, rest.split_once('@')?))) {
        // A slash before the sign means that it belongs to a path.
        Some((scheme, (user, host))) if !user.contains('/') => {
            clean.push_str(scheme);
            clean.push_str("://");
            clean.push_str(host);
        }
        _ => clean.push_str(place),
    }
    if has_options {
        clean.push_str(REMOVED_OPTIONS);
    }
}

/// Whether a word begins like a device URI, `file:/var/disk`, or follows a nested one: `]`.
fn has_scheme(word: &str) -> bool {
    let bare = word.trim_start_matches(['(', '<', '`']);
    bare.is_empty()
        || bare.split_once(':').is_some_and(|(scheme, _)| {
            !scheme.is_empty()
                && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-".contains(&byte))
        })
}

/// Characters that end a word: white space, quotes, and those that enclose and separate nested URIs.
fn is_separator(character: char) -> bool {
    character.is_whitespace() || matches!(character, '"' | '\'' | '[' | ']' | ',' | '\\')
}

#[cfg(test)]
mod tests {
    use super::redact;

    #[test]
    fn keys_are_removed_wherever_they_are() {
        let text =
            r#"{"a": "NVMeTLSkey-1:01:c2VjcmV0:", "b": ["x=DHHC-1:00:c2VjcmV0=:"]} DHHC-1:z"#;
        let clean = redact(text);
        assert!(!clean.contains("c2VjcmV0") && !clean.contains("DHHC-1:z"), "{clean}");
        assert_eq!(clean, r#"{"a": "[key removed]", "b": ["x=[key removed]"]} [key removed]"#);
    }

    #[test]
    fn uris_lose_their_options_and_passwords() {
        let of = |text| redact(text);
        assert_eq!(of("file:/var/disk?size=10g"), "file:/var/disk?[options removed]");
        assert_eq!(
            of("\"crypt:[file:/a?size=1m]?key-file=/etc/key\""),
            "\"crypt:[file:/a?[options removed]]?[options removed]\""
        );
        assert_eq!(of("rbd://user:secret@host/pool/x"), "rbd://host/pool/x");
        assert_eq!(of("tcp://host/nqn.2026-01.a:b@c/1"), "tcp://host/nqn.2026-01.a:b@c/1");
        for kept in ["what is it? a question", "10.0.0.7:41000", "a:b", "why?", "?"] {
            assert_eq!(of(kept), kept);
        }
    }
}
