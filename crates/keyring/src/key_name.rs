//! Name of a key.

use std::fmt;
use std::str::FromStr;

use tenmil_base::text::escape;

use crate::KeyringError;

/// Name of a key: 1 to 64 letters, digits, `.`, `_` and `-`, of which the first is a letter or a
/// digit. It is the name of the file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyName(String);

/// Longest name.
const NAME_BYTES_MAX: usize = 64;

/// Prefixes of key texts.
const PREFIXES: [&str; 2] = ["NVMeTLSkey-1:", "DHHC-1:"];

impl KeyName {
    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether a text contains a key. Such a text must not be repeated in a message.
#[must_use]
pub fn contains_key_text(text: &str) -> bool {
    PREFIXES.iter().any(|prefix| text.contains(prefix))
}

impl FromStr for KeyName {
    type Err = KeyringError;

    /// An error does not repeat the text, since a key may be given in place of its name.
    fn from_str(text: &str) -> Result<Self, KeyringError> {
        let refuse = |found: String| Err(KeyringError::Name { found });
        if contains_key_text(text) {
            return refuse("a key".to_owned());
        }
        if text.is_empty() {
            return refuse("an empty name".to_owned());
        }
        if text.len() > NAME_BYTES_MAX {
            return refuse(format!("{} bytes", text.len()));
        }
        let is_permitted = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
        if let Some(letter) = text.chars().find(|letter| !is_permitted(*letter)) {
            return refuse(format!("'{}' in it", escape(&letter.to_string())));
        }
        if !text.starts_with(|first: char| first.is_ascii_alphanumeric()) {
            return refuse(format!("'{}' at its start", &text[..1]));
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for KeyName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}
