//! Percent-encoding of path segments and query parameters (RFC 3986, section 2.1).

/// Encodes everything but unreserved characters (RFC 3986, section 2.3).
pub(crate) fn encode(text: &str) -> String {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                encoded.push(char::from(byte));
            }
            _ => {
                encoded.push('%');
                for digit in [byte >> 4, byte & 15] {
                    encoded.push(char::from(DIGITS[usize::from(digit)]));
                }
            }
        }
    }
    encoded
}

/// Decodes a segment, or a name or value of a query, in which `+` is a space. `None` if a `%` is not
/// followed by two hexadecimal digits, or the result is not UTF-8.
pub(crate) fn decode(text: &str, plus_is_space: bool) -> Option<String> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => {
                let (high, low) = (hex_digit(bytes.next()?)?, hex_digit(bytes.next()?)?);
                high << 4 | low
            }
            b'+' if plus_is_space => b' ',
            byte => byte,
        });
    }
    String::from_utf8(decoded).ok()
}

fn hex_digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        b'A'..=b'F' => Some(byte - b'A' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{decode, encode};

    #[test]
    fn every_text_survives_encoding_and_only_unreserved_characters_remain() {
        let all: String = (0..=0x2ff).filter_map(char::from_u32).collect();
        let encoded = encode(&all);
        assert!(
            encoded.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~%".contains(&byte))
        );
        assert_eq!(decode(&encoded, false).as_deref(), Some(all.as_str()));
        assert_eq!(decode(&encoded, true).as_deref(), Some(all.as_str()));
        assert_eq!(encode("a b/c:d"), "a%20b%2Fc%3Ad");
    }

    #[test]
    fn malformed_encoding_is_rejected() {
        for text in ["%", "%2", "%2g", "%g2", "%-1", "a%", "%ff", "%c3%28"] {
            assert_eq!(decode(text, false), None, "{text}");
        }
        assert_eq!(decode("a+b%2B", true).as_deref(), Some("a b+"));
        assert_eq!(decode("a+b%2b", false).as_deref(), Some("a+b+"));
    }
}
