//! Options of a URI: keys with values after the question mark, each consumed once.

use std::ops::RangeInclusive;

use tenmil_base::Span;

use super::{Uri, UriError, renamed_options};
use crate::quantity_parser::{parse_size, parse_time};

/// The options that have not been consumed yet, and the keys that were queried.
#[derive(Debug)]
pub struct UriOptions<'a> {
    uri: &'a Uri,
    left: Vec<&'a (String, String)>,
    asked: Vec<&'static str>,
    /// Path behind the bracketed devices, until it is consumed.
    path_after_children: &'a str,
}

impl<'a> UriOptions<'a> {
    pub(super) fn new(uri: &'a Uri, pairs: &'a [(String, String)]) -> Self {
        let path_after_children = if uri.children().is_empty() { "" } else { uri.path() };
        Self { uri, left: pairs.iter().collect(), asked: Vec::new(), path_after_children }
    }

    /// Consumes the path behind the bracketed devices; empty if there is none.
    pub fn path_after_children(&mut self) -> &'a str {
        std::mem::take(&mut self.path_after_children)
    }

    /// Consumes the value of a key, if present.
    pub fn text_value(&mut self, key: &'static str) -> Option<String> {
        self.asked.push(key);
        let position = self.left.iter().position(|(name, _)| name == key)?;
        Some(self.left.remove(position).1.clone())
    }

    /// Consumes every key that begins with `prefix`, in the order given: the rest of the key, and its value. Messages
    /// show the keys as `shown`.
    pub fn text_values_with_prefix(
        &mut self,
        prefix: &str,
        shown: &'static str,
    ) -> Vec<(String, String)> {
        self.asked.push(shown);
        let rest_of =
            |key: &str| key.strip_prefix(prefix).filter(|rest| !rest.is_empty()).map(str::to_owned);
        let found = self
            .left
            .iter()
            .filter_map(|(key, value)| Some((rest_of(key)?, value.clone())))
            .collect();
        self.left.retain(|(key, _)| rest_of(key).is_none());
        found
    }

    /// Consumes an integer in a range.
    pub fn number_value(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
    ) -> Result<Option<u64>, UriError> {
        let Some(text) = self.text_value(key) else { return Ok(None) };
        let number = parse_digits(&text, 10).filter(|number| range.contains(number));
        let (low, high) = (range.start(), range.end());
        self.value_or_error(number, key, &text, &format!("a number from {low} to {high}"))
    }

    /// Consumes the seed of randomness.
    pub fn seed_value(&mut self) -> Result<Option<u64>, UriError> {
        let Some(text) = self.text_value("seed") else { return Ok(None) };
        let number = match text.strip_prefix("0x") {
            Some(hexadecimal) => parse_digits(hexadecimal, 16),
            None => parse_digits(&text, 10),
        };
        self.value_or_error(number, "seed", &text, "a number")
    }

    /// Consumes a size in bytes.
    pub fn size_value(&mut self, key: &'static str) -> Result<Option<u64>, UriError> {
        let Some(text) = self.text_value(key) else { return Ok(None) };
        parse_size(&text).map(Some).map_err(|problem| self.uri.error(format!("{key}: {problem}")))
    }

    /// Consumes a duration: `80us`, `1.5ms`, or seconds without a unit.
    pub fn time_value(&mut self, key: &'static str) -> Result<Option<Span>, UriError> {
        let Some(text) = self.text_value(key) else { return Ok(None) };
        parse_time(&text).map(Some).map_err(|problem| self.uri.error(format!("{key}: {problem}")))
    }

    /// Consumes one of several keywords.
    pub fn choice_value<T: Copy>(
        &mut self,
        key: &'static str,
        choices: &[(&'static str, T)],
    ) -> Result<Option<T>, UriError> {
        let Some(text) = self.text_value(key) else { return Ok(None) };
        let chosen = choices.iter().find(|(word, _)| *word == text).map(|(_, choice)| *choice);
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        self.value_or_error(chosen, key, &text, &accepted_values(&words))
    }

    /// Consumes a block size: a power of two from 512 to 65536.
    pub fn block_size(&mut self) -> Result<Option<u32>, UriError> {
        let Some(text) = self.text_value("block") else { return Ok(None) };
        let size = parse_size(&text).ok().and_then(|size| u32::try_from(size).ok());
        let size = size.filter(|size| size.is_power_of_two() && (512..=65_536).contains(size));
        self.value_or_error(size, "block", &text, "a power of two from 512 to 64k")
    }

    /// Rejects options that were not consumed.
    pub fn reject_unconsumed(self) -> Result<(), UriError> {
        if !self.path_after_children.is_empty() {
            let problem =
                format!("`/{}` follows a bracket, expected ?KEY=VALUE", self.path_after_children);
            return Err(self.uri.error(problem));
        }
        match self.left.first() {
            None => Ok(()),
            Some((key, _)) => {
                if let Some(new) = renamed_options::renamed_key(self.uri.scheme(), key) {
                    return Err(self.uri.error(format!("`{key}` is now `{new}`")));
                }
                let expected = accepted_values(&self.asked);
                Err(self.uri.error(format!("no parameter `{key}`, expected {expected}")))
            }
        }
    }

    fn value_or_error<T>(
        &self,
        value: Option<T>,
        key: &str,
        text: &str,
        expected: &str,
    ) -> Result<Option<T>, UriError> {
        let refused = || self.uri.error(format!("{key} is `{text}`, expected {expected}"));
        value.map(Some).ok_or_else(refused)
    }
}

/// Formats `a`, `a or b`, `a, b or c`.
fn accepted_values(words: &[&str]) -> String {
    match words {
        [] => "none".into(),
        [one] => (*one).into(),
        [most @ .., last] => format!("{} or {last}", most.join(", ")),
    }
}

fn parse_digits(text: &str, radix: u32) -> Option<u64> {
    let plain = text.chars().all(|digit| digit.is_digit(radix));
    u64::from_str_radix(text, radix).ok().filter(|_| plain)
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;

    use crate::uri::Uri;

    fn sample_uri(query: &str) -> Uri {
        format!("x:?{query}").parse().unwrap()
    }

    #[test]
    fn unused_uri_options_are_rejected() {
        let uri = sample_uri("a=1&b=x=y&");
        let mut fields = uri.options();
        assert_eq!(fields.text_value("b").as_deref(), Some("x=y"));
        assert_eq!(fields.text_value("c"), None);
        let refusal = fields.reject_unconsumed().unwrap_err().to_string();
        assert_eq!(refusal, "x:?a=1&b=x=y: no parameter `a`, expected b or c");
    }

    #[test]
    fn options_with_a_prefix_are_consumed_together() {
        let uri = sample_uri("conf-a=1&b=2&conf-c-d=x&conf-=3");
        let mut fields = uri.options();
        let found = fields.text_values_with_prefix("conf-", "conf-NAME");
        assert_eq!(found, [("a".to_owned(), "1".to_owned()), ("c-d".to_owned(), "x".to_owned())]);
        assert_eq!(fields.text_value("b").as_deref(), Some("2"));
        let refusal = fields.reject_unconsumed().unwrap_err().to_string();
        assert!(refusal.ends_with("no parameter `conf-`, expected conf-NAME or b"), "{refusal}");
    }

    #[test]
    fn unexpected_path_after_children_is_rejected() {
        let uri: Uri = "delay:[ram:1m]/x".parse().unwrap();
        let refusal = uri.options().reject_unconsumed().unwrap_err().to_string();
        assert_eq!(refusal, "delay:[ram:1m]/x: `/x` follows a bracket, expected ?KEY=VALUE");
        let mut fields = uri.options();
        assert_eq!(fields.path_after_children(), "x");
        fields.reject_unconsumed().unwrap();
    }

    #[test]
    fn uri_option_values_of_every_type_are_parsed() {
        let uri = sample_uri("n=3&size=4k&t=80us&block=4k&seed=0xff&way=up");
        let mut fields = uri.options();
        assert_eq!(fields.number_value("n", 1..=3), Ok(Some(3)));
        assert_eq!(fields.size_value("size"), Ok(Some(4096)));
        assert_eq!(fields.time_value("t"), Ok(Some(Span::from_us(80))));
        assert_eq!(fields.block_size(), Ok(Some(4096)));
        assert_eq!(fields.seed_value(), Ok(Some(255)));
        assert_eq!(fields.choice_value("way", &[("up", 1), ("down", 2)]), Ok(Some(1)));
        assert_eq!(fields.number_value("m", 1..=3), Ok(None));
        fields.reject_unconsumed().unwrap();
    }

    #[test]
    fn invalid_option_value_is_rejected_with_the_accepted_values() {
        let refusal = |query: &str| {
            let uri = sample_uri(query);
            let mut fields = uri.options();
            let refused = fields
                .number_value("n", 1..=3)
                .and_then(|_| fields.choice_value("way", &[("up", 1), ("down", 2), ("on", 3)]))
                .and_then(|_| fields.block_size())
                .and_then(|_| fields.seed_value())
                .and_then(|_| fields.time_value("t"));
            refused.unwrap_err().to_string()
        };
        assert_eq!(refusal("n=4"), "x:?n=4: n is `4`, expected a number from 1 to 3");
        assert_eq!(refusal("n=+2"), "x:?n=+2: n is `+2`, expected a number from 1 to 3");
        assert_eq!(refusal("way=by"), "x:?way=by: way is `by`, expected up, down or on");
        assert!(refusal("block=513").ends_with("expected a power of two from 512 to 64k"));
        assert!(refusal("seed=").ends_with("seed is ``, expected a number"));
        assert!(refusal("t=fast").contains("t: `fast` is not a time"));
    }
}
