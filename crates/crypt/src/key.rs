//! AES-256-XTS keys from key files.

use std::fmt;
use std::hint::black_box;
use std::path::Path;
use tenmil_base::Error;

use tenmil_linux::key_file::read_key_file;

/// Key for AES-256-XTS: one half for the data, one for the tweaks. Overwritten on drop.
pub struct XtsKey([u8; XtsKey::BYTES]);

impl XtsKey {
    /// Length of a key in bytes.
    pub const BYTES: usize = 64;

    /// Reads a key of 64 bytes, or of 128 hexadecimal digits with an optional line end, from a file
    /// that only its owner may read.
    ///
    /// # Errors
    ///
    /// If the file does not exist, others may read it, or its content is not a key. The message
    /// contains nothing of the content.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let mut bytes =
            read_key_file(path, 2 * Self::BYTES as u64 + 2).map_err(Error::environment)?;
        let key =
            Self::parse(&bytes).map_err(|problem| format!("read {}: {problem}", path.display()));
        zeroize(&mut bytes);
        key.map_err(Error::environment)
    }

    /// Parses the content of a key file.
    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut key = Self([0; Self::BYTES]);
        if bytes.len() == Self::BYTES {
            key.0.copy_from_slice(bytes);
        } else {
            let digits = bytes.trim_ascii_end();
            let expected = "expected 64 bytes, or 128 hexadecimal digits";
            if digits.len() != 2 * Self::BYTES {
                return Err(format!("found {} bytes, {expected}", bytes.len()));
            }
            for (byte, pair) in key.0.iter_mut().zip(digits.chunks_exact(2)) {
                let digit = |digit: u8| char::from(digit).to_digit(16);
                let value = digit(pair[0]).zip(digit(pair[1])).map(|(high, low)| high << 4 | low);
                *byte = value
                    .and_then(|value| u8::try_from(value).ok())
                    .ok_or_else(|| format!("found other characters than digits, {expected}"))?;
            }
        }
        // With equal halves the tweaks reveal the data (Rogaway's attack; FIPS 140 rejects such
        // keys).
        if key.0[..32] == key.0[32..] {
            return Err("both halves of the key are the same, expected different ones".into());
        }
        Ok(key)
    }

    /// Key bytes, for the cipher.
    pub(crate) const fn bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl Drop for XtsKey {
    fn drop(&mut self) {
        zeroize(&mut self.0);
    }
}

impl fmt::Debug for XtsKey {
    /// Reveals nothing of the key.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Key")
    }
}

/// Overwrites bytes in a way that is not optimized away.
pub(crate) fn zeroize(bytes: &mut [u8]) {
    bytes.fill(0);
    black_box(bytes);
}

#[cfg(test)]
mod tests {
    use super::XtsKey;

    #[test]
    fn key_is_read_as_binary_or_hex() {
        let bytes: Vec<u8> = (0..64).collect();
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(XtsKey::parse(&bytes).unwrap().bytes()[..], bytes[..]);
        for text in [digits.clone(), digits.to_uppercase(), digits + "\n"] {
            assert_eq!(XtsKey::parse(text.as_bytes()).unwrap().bytes()[..], bytes[..]);
        }
    }

    #[test]
    fn invalid_key_is_rejected_without_showing_it() {
        let twice = "ab".repeat(64);
        let odd = "xy".repeat(64);
        for (bytes, problem) in [
            (&b"secret"[..], "found 6 bytes, expected 64 bytes, or 128 hexadecimal digits"),
            (&[7; 64], "both halves of the key are the same, expected different ones"),
            (twice.as_bytes(), "both halves of the key are the same, expected different ones"),
            (odd.as_bytes(), "found other characters than digits, expected 64 bytes, or 128 hex"),
        ] {
            let refused = XtsKey::parse(bytes).unwrap_err();
            assert!(refused.starts_with(problem), "{refused}");
        }
        let key = XtsKey::parse(&(0..64).collect::<Vec<u8>>()).unwrap();
        assert_eq!(format!("{key:?}"), "Key");
    }
}
