//! Conversion of configuration files of version 0.1.

use tenmil_block::uri::Uri;

use super::ConfigError;

/// Old key, new key. No table of version 0.2 has a key with one of the old names.
const RENAMED: [(&str, &str); 4] = [
    ("memory", "buffer-memory"),
    ("state", "state-dir"),
    ("hosts", "allowed-hosts"),
    ("access", "ana-state"),
];

/// Configuration file in the syntax of this version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigratedConfig {
    /// Text of the file. Comments, order and layout are those of the original.
    pub text: String,
    /// Changed words, with their lines.
    pub changes: Vec<String>,
}

/// Part of a TOML document, as far as the conversion distinguishes them.
enum TomlToken<'a> {
    /// Letters, digits, `-` and `_` outside of strings and comments.
    Word(&'a str),
    /// Single-line string with its quotes.
    Text(&'a str),
    /// Anything else: space, punctuation, a comment, a multi-line string.
    Other(&'a str),
}

/// New name of the key `old`, if it was renamed.
pub(super) fn new_name_of_key(old: &str) -> Option<&'static str> {
    RENAMED.iter().find(|(key, _)| *key == old).map(|(_, new)| *new)
}

/// Converts a configuration file of version 0.1: keys, and parameters of device URIs. A file that is
/// converted already is returned unchanged.
///
/// # Errors
///
/// If the converted file is not valid.
pub fn migrate_config(text: &str) -> Result<MigratedConfig, ConfigError> {
    let (mut out, mut changes) = (String::with_capacity(text.len() + 64), Vec::new());
    let (mut rest, mut line) = (text, 1);
    while !rest.is_empty() {
        let (token, behind) = next_token(rest);
        let (TomlToken::Word(old) | TomlToken::Text(old) | TomlToken::Other(old)) = token;
        let new = match token {
            TomlToken::Word(word) if behind.trim_start_matches([' ', '\t']).starts_with('=') => {
                new_name_of_key(word).map(str::to_owned)
            }
            TomlToken::Text(text) => uri_with_new_names(text),
            TomlToken::Word(_) | TomlToken::Other(_) => None,
        };
        if let Some(new) = &new {
            changes.push(format!("line {line}: {old} is now {new}"));
        }
        out.push_str(new.as_deref().unwrap_or(old));
        line += old.matches('\n').count();
        rest = behind;
    }
    super::TargetConfig::parse(&out)?;
    Ok(MigratedConfig { text: out, changes })
}

/// The device URI in the string `text` with the new names of its parameters, if one was renamed. A port that
/// was implied is written out.
fn uri_with_new_names(text: &str) -> Option<String> {
    let quote = text.chars().next()?;
    let inner = text.strip_prefix(quote)?.strip_suffix(quote)?;
    let (old, new) = (inner.parse::<Uri>().ok()?, inner.parse::<Uri>().ok()?.with_renamed_keys());
    (old != new).then(|| format!("{quote}{new}{quote}"))
}

/// First token of `text`, which is not empty, and the rest.
fn next_token(text: &str) -> (TomlToken<'_>, &str) {
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_".contains(byte);
    let bytes = text.as_bytes();
    let split = |at: usize| text.split_at(at.min(text.len()));
    if is_word(&bytes[0]) {
        let (word, rest) = split(bytes.iter().take_while(|byte| is_word(byte)).count());
        return (TomlToken::Word(word), rest);
    }
    for quote in ["\"\"\"", "'''"] {
        if let Some(inner) = text.strip_prefix(quote) {
            let end = inner.find(quote).map_or(text.len(), |at| at + 6);
            let (string, rest) = split(end);
            return (TomlToken::Other(string), rest);
        }
    }
    match bytes[0] {
        b'#' => {
            let (comment, rest) = split(text.find('\n').unwrap_or(text.len()));
            (TomlToken::Other(comment), rest)
        }
        quote @ (b'"' | b'\'') => {
            let mut is_escaped = false;
            let end = bytes[1..].iter().position(|byte| {
                let is_end = *byte == quote && !is_escaped;
                is_escaped = quote == b'"' && *byte == b'\\' && !is_escaped;
                is_end
            });
            let (string, rest) = split(end.map_or(text.len(), |at| at + 2));
            (TomlToken::Text(string), rest)
        }
        _ => {
            let len = text.chars().next().map_or(1, char::len_utf8);
            let (other, rest) = split(len);
            (TomlToken::Other(other), rest)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::migrate_config;

    const OLD: &str = "\
# memory = \"1g\" was too much
memory = \"64m\"   # data buffers
state=\"/var/lib/tenmil\"

[[listener]]
address = \"127.0.0.1:4420\"

[[subsystem]]
nqn = \"nqn.2026-01.org.example:state\"
hosts = [\"nqn.2026-01.org.example:one\"]

[[subsystem.namespace]]
uri = \"tcp://10.0.0.2/nqn.2026-01.org.example:disk?detect=2s&depth=64\"
hosts = ['nqn.2026-01.org.example:one']

[[subsystem.path]]
listener = \"127.0.0.1:4420\"
access = \"non-optimized\"
";

    #[test]
    fn keys_and_uris_of_version_0_1_are_converted_and_nothing_else() {
        let migrated = migrate_config(OLD).unwrap();
        let expected = OLD
            .replace("\nmemory =", "\nbuffer-memory =")
            .replace("\nstate=", "\nstate-dir=")
            .replace("\nhosts =", "\nallowed-hosts =")
            .replace("\naccess =", "\nana-state =")
            .replace("10.0.0.2/nqn", "10.0.0.2:4420/nqn")
            .replace("detect=2s", "keep-alive-timeout=2s");
        assert_eq!(migrated.text, expected);
        assert_eq!(migrated.changes.len(), 6, "{:?}", migrated.changes);
        assert_eq!(migrated.changes[0], "line 2: memory is now buffer-memory");
    }

    #[test]
    fn converted_file_is_unchanged_by_a_second_conversion() {
        let once = migrate_config(OLD).unwrap();
        let again = migrate_config(&once.text).unwrap();
        assert_eq!((again.text, again.changes), (once.text, Vec::new()));
    }

    #[test]
    fn invalid_file_is_rejected_with_its_line() {
        let error = migrate_config("memory = 64\n").unwrap_err();
        assert_eq!(error.line, 1);
    }
}
