//! Types of parameters.

use serde_json::{Value, json};
use tenmil_linux::CpuList;

use crate::arguments::Argument;
use crate::error::{join_alternatives, quote_untrusted};

/// Type of a parameter: its allowed values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamType {
    /// Text of 1 to `len_max` bytes.
    Text {
        /// Largest length in bytes.
        len_max: usize,
    },
    /// One text or a list of up to `count_max` of them, each of 1 to `len_max` bytes. On a command line the
    /// parameter is repeated.
    Texts {
        /// Largest length of each in bytes.
        len_max: usize,
        /// Largest number.
        count_max: usize,
    },
    /// Boolean.
    Flag,
    /// Integer within an inclusive range.
    Whole {
        /// Smallest value.
        min: u64,
        /// Largest value.
        max: u64,
    },
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// Processors: a list such as `0,2-3`, or a mask such as `0xd`.
    Cores,
}

/// Longest processor list: a short text must not cause much work.
const CORES_LEN_MAX: usize = 1024;
const CORES_PATTERN: &str = "^(0[xX][0-9a-fA-F]+|[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)$";

impl ParamType {
    /// Validates a JSON value. The error names the expected type.
    pub fn validate(self, value: &Value) -> Result<Argument, String> {
        let read = match (self, value) {
            (Self::Text { len_max }, Value::String(text)) => {
                (1..=len_max).contains(&text.len()).then(|| Argument::Text(text.clone()))
            }
            (Self::Texts { len_max, .. }, Value::String(_)) => {
                return Self::Text { len_max }.validate(value).map(|one| match one {
                    Argument::Text(text) => Argument::Texts(vec![text]),
                    other => other,
                });
            }
            (Self::Texts { len_max, count_max }, Value::Array(list)) => {
                let fits = |text: &&str| (1..=len_max).contains(&text.len());
                let texts = list.iter().map(|one| one.as_str().filter(fits).map(str::to_owned));
                let texts = texts.collect::<Option<Vec<_>>>();
                texts.filter(|it| (1..=count_max).contains(&it.len())).map(Argument::Texts)
            }
            (Self::Flag, Value::Bool(flag)) => Some(Argument::Flag(*flag)),
            (Self::Whole { min, max }, Value::Number(number)) => {
                number.as_u64().filter(|it| (min..=max).contains(it)).map(Argument::Whole)
            }
            (Self::OneOf(words), Value::String(text)) => {
                words.iter().find(|word| *word == text).map(|word| Argument::Text((*word).into()))
            }
            (Self::Cores, Value::String(text)) => {
                let cores = Some(text).filter(|text| text.len() <= CORES_LEN_MAX);
                cores.and_then(|text| CpuList::parse(text).ok()).map(Argument::Cores)
            }
            _ => None,
        };
        read.ok_or_else(|| format!("is {}, expected {}", value_text(value), self.expected_text()))
    }

    /// Converts command-line text into a JSON value.
    pub fn parse_text(self, text: &str) -> Result<Value, String> {
        let value = match self {
            Self::Text { .. } | Self::Texts { .. } | Self::OneOf(_) | Self::Cores => {
                Value::from(text)
            }
            Self::Flag => match text {
                "true" | "yes" | "on" => true.into(),
                "false" | "no" | "off" => false.into(),
                _ => text.into(),
            },
            Self::Whole { .. } => text.parse::<u64>().map_or_else(|_| text.into(), Value::from),
        };
        self.validate(&value).map(|_| value)
    }

    /// Description of the allowed values, to follow "expected".
    pub fn expected_text(self) -> String {
        match self {
            Self::Text { len_max } => format!("a text of 1 to {len_max} bytes"),
            Self::Texts { len_max, count_max } => {
                format!("a text of 1 to {len_max} bytes, or a list of 1 to {count_max} of them")
            }
            Self::Flag => "true or false".into(),
            Self::Whole { min, max: u64::MAX } => format!("a whole number from {min}"),
            Self::Whole { min, max } => format!("a whole number from {min} to {max}"),
            Self::OneOf(words) => join_alternatives(words),
            Self::Cores => "processors such as 0,2-3 or 0xd".into(),
        }
    }

    /// JSON schema of the type.
    pub fn json_schema(self) -> Value {
        match self {
            Self::Text { len_max } => {
                json!({ "type": "string", "minLength": 1, "maxLength": len_max })
            }
            Self::Texts { len_max, count_max } => {
                let one = Self::Text { len_max }.json_schema();
                let list = json!({
                    "type": "array", "items": one, "minItems": 1, "maxItems": count_max,
                });
                json!({ "oneOf": [one, list] })
            }
            Self::Flag => json!({ "type": "boolean" }),
            Self::Whole { min, max } => {
                json!({ "type": "integer", "minimum": min, "maximum": max })
            }
            Self::OneOf(words) => json!({ "type": "string", "enum": words }),
            Self::Cores => json!({ "type": "string", "pattern": CORES_PATTERN }),
        }
    }

    /// Allowed words, if they can be enumerated.
    pub fn enumerated_words(self) -> &'static [&'static str] {
        match self {
            Self::OneOf(words) => words,
            Self::Flag => &["true", "false"],
            _ => &[],
        }
    }
}

/// Formats a value for a message.
pub(crate) fn value_text(value: &Value) -> String {
    match value {
        Value::String(text) => quote_untrusted(text),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
        plain => plain.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tenmil_linux::CpuList;

    use super::ParamType;
    use crate::arguments::Argument;

    const SMALL: ParamType = ParamType::Whole { min: 1, max: 100 };
    const MODE: ParamType = ParamType::OneOf(&["always", "adaptive"]);
    const NAMES: ParamType = ParamType::Texts { len_max: 3, count_max: 2 };
    const NAMES_EXPECTED: &str =
        "is a list, expected a text of 1 to 3 bytes, or a list of 1 to 2 of them";

    #[test]
    fn valid_value_is_accepted() {
        let text = |text: &str| Argument::Text(text.into());
        for (kind, value, expected) in [
            (ParamType::Text { len_max: 3 }, json!("abc"), text("abc")),
            (NAMES, json!("abc"), Argument::Texts(vec!["abc".into()])),
            (NAMES, json!(["abc", "b"]), Argument::Texts(vec!["abc".into(), "b".into()])),
            (ParamType::Flag, json!(false), Argument::Flag(false)),
            (SMALL, json!(1), Argument::Whole(1)),
            (SMALL, json!(100), Argument::Whole(100)),
            (
                ParamType::Whole { min: 0, max: u64::MAX },
                json!(u64::MAX),
                Argument::Whole(u64::MAX),
            ),
            (MODE, json!("always"), text("always")),
            (ParamType::Cores, json!("0-2,5"), Argument::Cores(CpuList::parse("0-2,5").unwrap())),
        ] {
            assert_eq!(kind.validate(&value), Ok(expected));
        }
    }

    #[test]
    fn value_of_another_type_is_rejected_with_the_accepted_ones() {
        for (kind, value, expected) in [
            (
                ParamType::Text { len_max: 3 },
                json!("abcd"),
                "is `abcd`, expected a text of 1 to 3 bytes",
            ),
            (ParamType::Text { len_max: 3 }, json!(""), "is ``, expected a text of 1 to 3 bytes"),
            (NAMES, json!("abcd"), "is `abcd`, expected a text of 1 to 3 bytes"),
            (NAMES, json!([]), NAMES_EXPECTED),
            (NAMES, json!(["a", "b", "c"]), NAMES_EXPECTED),
            (NAMES, json!(["a", 1]), NAMES_EXPECTED),
            (NAMES, json!(["a", ""]), NAMES_EXPECTED),
            (ParamType::Flag, json!("true"), "is `true`, expected true or false"),
            (SMALL, json!(0), "is 0, expected a whole number from 1 to 100"),
            (SMALL, json!(101), "is 101, expected a whole number from 1 to 100"),
            (SMALL, json!(-1), "is -1, expected a whole number from 1 to 100"),
            (SMALL, json!(1.5), "is 1.5, expected a whole number from 1 to 100"),
            (SMALL, json!("5"), "is `5`, expected a whole number from 1 to 100"),
            (SMALL, Value::Null, "is null, expected a whole number from 1 to 100"),
            (MODE, json!("Always"), "is `Always`, expected always or adaptive"),
            (MODE, json!(["always"]), "is a list, expected always or adaptive"),
            (ParamType::Cores, json!("3-1"), "is `3-1`, expected processors such as 0,2-3 or 0xd"),
            (ParamType::Cores, json!(""), "is ``, expected processors such as 0,2-3 or 0xd"),
            (ParamType::Cores, json!({}), "is an object, expected processors such as 0,2-3 or 0xd"),
        ] {
            assert_eq!(kind.validate(&value), Err(expected.into()));
        }
    }

    #[test]
    fn command_line_text_becomes_a_json_value() {
        assert_eq!(SMALL.parse_text("7"), Ok(json!(7)));
        assert_eq!(
            SMALL.parse_text("x"),
            Err("is `x`, expected a whole number from 1 to 100".into())
        );
        assert_eq!(ParamType::Flag.parse_text("on"), Ok(json!(true)));
        assert_eq!(ParamType::Flag.parse_text("no"), Ok(json!(false)));
        assert!(ParamType::Flag.parse_text("maybe").is_err());
        assert_eq!(ParamType::Text { len_max: 9 }.parse_text("7"), Ok(json!("7")));
        assert_eq!(MODE.parse_text("adaptive"), Ok(json!("adaptive")));
        assert_eq!(ParamType::Cores.parse_text("1,3"), Ok(json!("1,3")));
    }
}
