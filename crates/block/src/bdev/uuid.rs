//! UUID of a bdev.

use std::fmt;
use std::str::FromStr;

use tenmil_base::Random;

/// A UUID, formatted as `8-4-4-4-12` hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uuid(pub [u8; 16]);

/// Error: the text is not a UUID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UuidParseError(String);

/// Bytes between the hyphens.
const GROUPS: [usize; 5] = [8, 4, 4, 4, 12];

impl Uuid {
    /// A random UUID (version 4, RFC 9562) derived from this seed.
    pub fn from_seed(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&random.next_u64().to_be_bytes());
        bytes[8..].copy_from_slice(&random.next_u64().to_be_bytes());
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Self(bytes)
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            let hyphen = if matches!(index, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(out, "{hyphen}{byte:02x}")?;
        }
        Ok(())
    }
}

impl FromStr for Uuid {
    type Err = UuidParseError;

    fn from_str(text: &str) -> Result<Self, UuidParseError> {
        let refuse = || UuidParseError(text.to_owned());
        let lens = text.split('-').map(str::len);
        if !lens.eq(GROUPS) || !text.is_ascii() {
            return Err(refuse());
        }
        let digits: Vec<u32> = text
            .chars()
            .filter(|digit| *digit != '-')
            .map_while(|digit| digit.to_digit(16))
            .collect();
        let mut bytes = [0; 16];
        if digits.len() != 2 * bytes.len() {
            return Err(refuse());
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
            *byte = u8::try_from(pair[0] << 4 | pair[1]).map_err(|_| refuse())?;
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for UuidParseError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let expected = "expected a UUID like 123e4567-e89b-42d3-a456-426614174000";
        write!(out, "found `{}`, {expected}", self.0)
    }
}

impl std::error::Error for UuidParseError {}

#[cfg(test)]
mod tests {
    use super::Uuid;

    #[test]
    fn uuid_display_and_parse_round_trip() {
        let uuid = Uuid::from_seed(7);
        let text = uuid.to_string();
        assert_eq!(text.parse(), Ok(uuid));
        assert_eq!(text.to_uppercase().parse(), Ok(uuid));
        assert_eq!((text.len(), &text[14..15]), (36, "4"), "{text}");
        assert!(matches!(&text[19..20], "8" | "9" | "a" | "b"), "{text}");
        assert_ne!(uuid, Uuid::from_seed(8));
    }

    #[test]
    fn invalid_uuid_is_rejected_with_an_example() {
        let good = Uuid::from_seed(1).to_string();
        for bad in ["", &good[1..], &good.replace('-', ""), &format!("{}g", &good[..35])] {
            let error = bad.parse::<Uuid>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("found `{bad}`, expected a UUID like ")), "{error}");
        }
    }
}
