//! Strict JSON parser: duplicate members are rejected, since it is unknown which of them was meant.

use core::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::quote_untrusted;

/// Parses a single value. Nesting is limited to 127 levels.
pub(crate) fn parse_json(bytes: &[u8]) -> Result<Value, serde_json::Error> {
    serde_json::from_slice(bytes).map(|StrictJsonValue(value)| value)
}

struct StrictJsonValue(Value);

impl<'de> Deserialize<'de> for StrictJsonValue {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(JsonParser).map(Self)
    }
}

struct JsonParser;

impl<'de> Visitor<'de> for JsonParser {
    type Value = Value;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        let number = Number::from_f64(value);
        number.map(Value::Number).ok_or_else(|| E::custom("a number that is none"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(StrictJsonValue(value)) = from.next_element()? {
            list.push(value);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(name) = from.next_key::<String>()? {
            let StrictJsonValue(value) = from.next_value()?;
            if map.contains_key(&name) {
                let name = quote_untrusted(&name);
                return Err(A::Error::custom(format_args!("member {name} is there twice")));
            }
            map.insert(name, value);
        }
        Ok(map.into())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tenmil_base::Random;

    use super::parse_json;

    #[test]
    fn every_kind_of_json_value_is_parsed() {
        let text = r#"{"a":[null,true,1,-1,1.5,18446744073709551615,"ä\n\u00e4"],"b":{"c":{}}}"#;
        let plain: Value = serde_json::from_str(text).unwrap();
        assert_eq!(parse_json(text.as_bytes()).unwrap(), plain);
    }

    #[test]
    fn duplicate_member_is_rejected_at_any_depth() {
        for text in [r#"{"a":1,"a":1}"#, r#"[{"b":{"a":1,"c":2,"a":3}}]"#, r#"{"a":1,"\u0061":2}"#]
        {
            let refused = parse_json(text.as_bytes()).unwrap_err().to_string();
            assert!(refused.starts_with("member `a` is there twice"), "{refused}");
        }
        assert_eq!(parse_json(br#"[{"a":1},{"a":1}]"#).unwrap(), json!([{"a": 1}, {"a": 1}]));
    }

    #[test]
    fn invalid_json_and_trailing_text_are_rejected() {
        for bytes in
            [&b""[..], b"{", b"nul", b"1 2", b"\xff", b"\"\xc3\"", b"[1,]", b"1e999", b"'a'"]
        {
            assert!(parse_json(bytes).is_err(), "{}", String::from_utf8_lossy(bytes));
        }
    }

    #[test]
    fn deep_nesting_is_rejected_before_the_stack_overflows() {
        let nested = |depth: usize, open: &str, close: &str| {
            parse_json(format!("{}1{}", open.repeat(depth), close.repeat(depth)).as_bytes())
        };
        for (open, close) in [("[", "]"), (r#"{"a":"#, "}")] {
            assert!(nested(127, open, close).is_ok());
            assert!(nested(128, open, close).is_err());
            assert!(nested(100_000, open, close).is_err());
        }
    }

    #[test]
    fn accepts_the_same_values_as_serde_json_except_duplicates() {
        let letters = br#"{}[]",:01.e-tfnal\u "#;
        let mut random = Random::new(5);
        let mut accepted = 0;
        for _ in 0..200_000 {
            let bytes: Vec<u8> = (0..random.below(7))
                .map(|_| letters[usize::try_from(random.below(20)).unwrap()])
                .collect();
            let plain = serde_json::from_slice::<Value>(&bytes);
            match parse_json(&bytes) {
                Ok(value) => {
                    assert_eq!(value, plain.unwrap());
                    accepted += 1;
                }
                Err(error) => {
                    assert!(plain.is_err() || error.to_string().contains("twice"), "{error}");
                }
            }
        }
        assert!(accepted > 1_000, "{accepted}");
    }
}
