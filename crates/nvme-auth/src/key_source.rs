//! Keys by name: what a keyring offers to the programs that use its keys.

use core::fmt;

use tenmil_base::Error;
use zeroize::Zeroizing;

use crate::{ChapSecret, ConfiguredPsk, KeyError, TlsPsk};

/// Keyring of the kernel with the TLS PSKs of its own NVMe/TCP, which stands in place of the name of a key.
/// No file of a keyring begins with a period.
pub const KERNEL_KEYRING: &str = ".nvme";

/// Finds keys by their names.
pub trait KeySource: Send + Sync {
    /// Text of the key with this name.
    ///
    /// # Errors
    ///
    /// If there is no such key, or it cannot be read. The error names the key and where it was
    /// searched, and never holds anything of the key.
    fn find_key(&self, name: &str) -> Result<KeyText, Error>;

    /// TLS PSKs of a host and a subsystem in the keyring [`KERNEL_KEYRING`], the preferred ones first.
    /// They are derived already.
    ///
    /// # Errors
    ///
    /// If there is none, or the keyring cannot be read.
    fn find_kernel_psks(&self, host_nqn: &str, subsystem_nqn: &str) -> Result<Vec<TlsPsk>, Error> {
        Err(Error::environment(format!(
            "find TLS PSKs of {host_nqn} and {subsystem_nqn}: this program does not read keyring \
             {KERNEL_KEYRING} of the kernel"
        )))
    }
}

/// Text of a key, `NVMeTLSkey-1:…` or `DHHC-1:…`, or what a user has stored in its place. It is
/// overwritten on drop, and `Debug` prints nothing of it.
#[derive(Clone)]
pub struct KeyText(Zeroizing<String>);

impl KeyText {
    /// Takes over a text that holds a key.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(Zeroizing::new(text.into()))
    }

    /// The text.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// The key as a pre-shared key of TLS. White space around it is ignored.
    ///
    /// # Errors
    ///
    /// As of [`ConfiguredPsk::parse`].
    pub fn psk(&self) -> Result<ConfiguredPsk, KeyError> {
        ConfiguredPsk::parse(self.0.trim())
    }

    /// The key as a DH-HMAC-CHAP secret. White space around it is ignored.
    ///
    /// # Errors
    ///
    /// As of [`ChapSecret::parse`].
    pub fn chap_secret(&self) -> Result<ChapSecret, KeyError> {
        ChapSecret::parse(self.0.trim())
    }
}

impl fmt::Debug for KeyText {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("KeyText")
    }
}

#[cfg(test)]
mod tests {
    use super::KeyText;
    use crate::{KeyError, KeyHash, SecretBytes};

    #[test]
    fn text_is_parsed_as_the_key_it_holds_and_printed_as_none() {
        let random = || SecretBytes::new((0..32).collect());
        let psk = crate::ConfiguredPsk::generate(KeyHash::None, random()).unwrap();
        let secret = crate::ChapSecret::generate(KeyHash::None, random()).unwrap();
        let of_psk = KeyText::new(format!("{}\n", *psk.to_text()));
        let of_secret = KeyText::new(format!(" {}\n", *secret.to_text()));
        assert_eq!((of_psk.psk(), of_secret.chap_secret()), (Ok(psk), Ok(secret)));
        assert!(matches!(of_psk.chap_secret(), Err(KeyError::Prefix { .. })));
        assert_eq!(format!("{of_psk:?}"), "KeyText");
    }
}
