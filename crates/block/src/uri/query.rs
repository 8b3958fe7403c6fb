//! The part of a URI after the question mark: keys, each with a value, each taken once.

use super::parse_size;

/// Keys and values that have not been asked for yet, and the keys that were.
#[derive(Debug)]
pub(super) struct Query {
    pairs: Vec<(String, String)>,
    asked: Vec<&'static str>,
}

impl Query {
    /// Cuts `KEY=VALUE&…` and decodes the values.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let mut pairs: Vec<(String, String)> = Vec::new();
        for part in text.split('&').filter(|part| !part.is_empty()) {
            let (key, value) = part
                .split_once('=')
                .ok_or_else(|| format!("'{part}' has no value, expected KEY=VALUE"))?;
            if pairs.iter().any(|(earlier, _)| earlier == key) {
                return Err(format!("{key} is given twice, expected once"));
            }
            let decoded = decode(value).ok_or_else(|| {
                let accepted = "two hexadecimal digits after a per cent sign";
                format!("{key} is '{value}', expected {accepted}")
            })?;
            pairs.push((key.into(), decoded));
        }
        Ok(Self { pairs, asked: Vec::new() })
    }

    /// The value of a key, if it is there.
    pub(super) fn text(&mut self, key: &'static str) -> Option<String> {
        self.asked.push(key);
        let position = self.pairs.iter().position(|(name, _)| name == key)?;
        Some(self.pairs.remove(position).1)
    }

    /// A whole number from `low` to `high`.
    pub(super) fn number(
        &mut self,
        key: &'static str,
        default: u64,
        low: u64,
        high: u64,
    ) -> Result<u64, String> {
        let Some(text) = self.text(key) else { return Ok(default) };
        let number = digits(&text, 10).filter(|number| (low..=high).contains(number));
        number.ok_or_else(|| format!("{key} is '{text}', expected a number from {low} to {high}"))
    }

    /// The number that all that is random comes from. Zero if it is not given.
    pub(super) fn seed(&mut self) -> Result<u64, String> {
        let Some(text) = self.text("seed") else { return Ok(0) };
        let number = match text.strip_prefix("0x") {
            Some(hexadecimal) => digits(hexadecimal, 16),
            None => digits(&text, 10),
        };
        number.ok_or_else(|| format!("seed is '{text}', expected a number"))
    }

    /// A number of bytes.
    pub(super) fn size(&mut self, key: &'static str) -> Result<Option<u64>, String> {
        let Some(text) = self.text(key) else { return Ok(None) };
        let accepted = "bytes, or a number and KiB, MiB, GiB or TiB";
        let size = parse_size(&text);
        size.map(Some).ok_or_else(|| format!("{key} is '{text}', expected {accepted}"))
    }

    /// One of a few words.
    pub(super) fn choice<T: Copy>(
        &mut self,
        key: &'static str,
        choices: &[(&'static str, T)],
    ) -> Result<Option<T>, String> {
        let Some(text) = self.text(key) else { return Ok(None) };
        let chosen = choices.iter().find(|(word, _)| *word == text);
        chosen.map(|(_, choice)| Some(*choice)).ok_or_else(|| {
            let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
            format!("{key} is '{text}', expected {}", either(&words))
        })
    }

    /// Refuses whatever nobody has asked for.
    pub(super) fn finish(self) -> Result<(), String> {
        match self.pairs.first() {
            None => Ok(()),
            Some((key, _)) => Err(format!("no key '{key}', expected {}", either(&self.asked))),
        }
    }
}

/// `a`, `a or b`, `a, b or c`.
fn either(words: &[&str]) -> String {
    match words {
        [] => "none".into(),
        [one] => (*one).into(),
        [most @ .., last] => format!("{} or {last}", most.join(", ")),
    }
}

fn digits(text: &str, radix: u32) -> Option<u64> {
    let plain = text.chars().all(|digit| digit.is_digit(radix));
    u64::from_str_radix(text, radix).ok().filter(|_| plain)
}

/// Replaces `%` and two hexadecimal digits by the byte they name.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let mut digit = || char::from(rest.next()?).to_digit(16);
            bytes.push(u8::try_from(digit()? << 4 | digit()?).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::{Query, decode};

    #[test]
    fn a_value_may_hold_what_the_syntax_uses() {
        assert_eq!(decode("/a%26b%3dc%25"), Some("/a&b=c%".into()));
        assert_eq!(decode("caf%c3%a9"), Some("café".into()));
        for text in ["%", "%4", "%zz", "%ff"] {
            assert_eq!(decode(text), None, "{text}");
        }
    }

    #[test]
    fn a_value_is_taken_once_and_what_is_left_is_refused() {
        let mut query = Query::parse("a=1&b=x=y&").unwrap();
        assert_eq!(query.text("b").as_deref(), Some("x=y"));
        assert_eq!(query.text("b"), None);
        assert_eq!(query.finish().unwrap_err(), "no key 'a', expected b or b");
        assert_eq!(Query::parse("").unwrap().finish(), Ok(()));
    }

    #[test]
    fn a_seed_may_be_hexadecimal() {
        let seed = |text: &str| Query::parse(text).unwrap().seed();
        assert_eq!(seed("seed=0xff"), Ok(255));
        assert_eq!(seed("seed=255"), Ok(255));
        assert_eq!(seed(""), Ok(0));
        assert!(seed("seed=+1").is_err() && seed("seed=").is_err());
    }
}
