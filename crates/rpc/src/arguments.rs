//! Arguments of a method call, validated against the method's definition.

use std::collections::BTreeMap;

use serde_json::{Map, Value};
use tenmil_linux::CpuList;

use crate::error::{ErrorCode, RpcError, join_alternatives, quote_untrusted};
use crate::method::{Method, ParamDefault, Parameter};
use crate::param_type::ParamType;

/// Validated arguments. Every value has the declared type, and every required parameter and every
/// parameter with a default is present.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Arguments {
    values: BTreeMap<&'static str, Argument>,
}

/// Value of an argument.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// Text, or one of the allowed words.
    Text(String),
    /// Texts, at least one.
    Texts(Vec<String>),
    /// Boolean.
    Flag(bool),
    /// Unsigned integer.
    Whole(u64),
    /// Set of processors, not empty.
    Cores(CpuList),
}

impl Arguments {
    /// Validates the parameters of a request.
    pub fn validate(method: &Method, given: &Map<String, Value>) -> Result<Self, RpcError> {
        let mut values = BTreeMap::new();
        for (name, value) in given {
            let parameter = method.parameter(name)?;
            let value = parameter
                .kind
                .validate(value)
                .map_err(|why| invalid_argument(method, parameter, &why))?;
            values.insert(parameter.name, value);
        }
        for parameter in method.parameters {
            if values.contains_key(parameter.name) {
                continue;
            }
            match parameter.need {
                ParamDefault::Optional => {}
                ParamDefault::Required => return Err(missing_argument(method, parameter)),
                ParamDefault::Default(text) => {
                    let value = parameter.kind.parse_text(text);
                    let value = value.and_then(|value| parameter.kind.validate(&value));
                    let value = value.map_err(|why| invalid_argument(method, parameter, &why))?;
                    values.insert(parameter.name, value);
                }
            }
        }
        Ok(Self { values })
    }

    /// All arguments with their names, in the order of the names.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &Argument)> {
        self.values.iter().map(|(name, value)| (*name, value))
    }

    /// Text or word argument of this name, if present.
    pub fn text(&self, name: &str) -> Option<&str> {
        match self.values.get(name)? {
            Argument::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Texts of this name, none if it is not present.
    pub fn texts(&self, name: &str) -> &[String] {
        match self.values.get(name) {
            Some(Argument::Texts(texts)) => texts,
            _ => &[],
        }
    }

    /// Boolean argument of this name, if present.
    pub fn boolean(&self, name: &str) -> Option<bool> {
        match self.values.get(name)? {
            Argument::Flag(flag) => Some(*flag),
            _ => None,
        }
    }

    /// Integer argument of this name, if present.
    pub fn integer(&self, name: &str) -> Option<u64> {
        match self.values.get(name)? {
            Argument::Whole(number) => Some(*number),
            _ => None,
        }
    }

    /// Processor set argument of this name, if present.
    pub fn cores(&self, name: &str) -> Option<&CpuList> {
        match self.values.get(name)? {
            Argument::Cores(cores) => Some(cores),
            _ => None,
        }
    }
}

/// Converts `key=value` words of a command line into request parameters. They are validated as the
/// server would, so a typing error is reported without a connection.
pub fn parse_command_line_words(
    method: &Method,
    words: &[String],
) -> Result<Map<String, Value>, RpcError> {
    let mut given = Map::new();
    for word in words {
        let Some((name, text)) = word.split_once('=') else {
            let names: Vec<&str> = method.parameters.iter().map(|known| known.name).collect();
            let (typed, word, names) =
                (method.command_line_name(), quote_untrusted(word), join_alternatives(&names));
            return Err(RpcError::usage(
                ErrorCode::NoSuchParameter,
                format!("{typed}: {word} has no `=`, expected NAME=VALUE where NAME is {names}"),
            ));
        };
        let parameter = method.parameter(name)?;
        let value = parameter
            .kind
            .parse_text(text)
            .map_err(|why| invalid_argument(method, parameter, &why))?;
        if matches!(parameter.kind, ParamType::Texts { .. }) {
            let list = given.entry(name).or_insert_with(|| Value::Array(Vec::new()));
            if let Value::Array(list) = list {
                list.push(value);
            }
        } else if given.insert(name.to_owned(), value).is_some() {
            let typed = method.command_line_name();
            return Err(RpcError::usage(
                ErrorCode::BadValue,
                format!("{typed}: {name} is given twice, expected once"),
            ));
        }
    }
    Arguments::validate(method, &given)?;
    Ok(given)
}

pub(crate) fn invalid_argument(method: &Method, parameter: &Parameter, why: &str) -> RpcError {
    let message = format!("{}: {} {why}", method.command_line_name(), parameter.name);
    RpcError::usage(ErrorCode::BadValue, message)
}

fn missing_argument(method: &Method, parameter: &Parameter) -> RpcError {
    let (typed, name, expected) =
        (method.command_line_name(), parameter.name, parameter.kind.expected_text());
    RpcError::usage(
        ErrorCode::MissingParameter,
        format!("{typed}: {name} is missing, expected {expected}"),
    )
    .with_hint(format!("for example `{}`", method.example))
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::{Arguments, parse_command_line_words};
    use crate::error::ErrorCode;
    use crate::method::{Method, MethodKind, ParamDefault, Parameter};
    use crate::param_type::ParamType;
    use crate::result_type::ResultType;

    const fn test_parameter(name: &'static str, kind: ParamType, need: ParamDefault) -> Parameter {
        Parameter { name, kind, need, help: "a thing" }
    }

    const METHOD: Method = Method {
        verb: MethodKind::Set,
        name: "wheel",
        parameters: &[
            test_parameter("name", ParamType::Text { len_max: 8 }, ParamDefault::Required),
            test_parameter(
                "spokes",
                ParamType::Whole { min: 1, max: 99 },
                ParamDefault::Default("28"),
            ),
            test_parameter("tubeless", ParamType::Flag, ParamDefault::Optional),
            test_parameter("mask", ParamType::Cores, ParamDefault::Optional),
            test_parameter(
                "tags",
                ParamType::Texts { len_max: 4, count_max: 2 },
                ParamDefault::Optional,
            ),
        ],
        answer: ResultType::Object,
        help: "Change a wheel",
        example: "tenmil set wheel name=front",
        run: |_| Ok(Value::Null),
    };

    fn validate_test_arguments(given: Value) -> Result<Arguments, (ErrorCode, String)> {
        Arguments::validate(&METHOD, given.as_object().unwrap())
            .map_err(|refusal| (refusal.code, refusal.message))
    }

    fn parse_command_line(line: &str) -> Result<Map<String, Value>, String> {
        let line: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        parse_command_line_words(&METHOD, &line).map_err(|refusal| refusal.message)
    }

    #[test]
    fn given_values_and_defaults_are_present() {
        let given = json!({ "name": "rear", "tubeless": true, "mask": "0-1" });
        let arguments = validate_test_arguments(given).unwrap();
        assert_eq!(arguments.text("name"), Some("rear"));
        assert_eq!(arguments.integer("spokes"), Some(28));
        assert_eq!(arguments.boolean("tubeless"), Some(true));
        assert_eq!(arguments.cores("mask").unwrap().len(), 2);
        let arguments = validate_test_arguments(json!({ "name": "rear", "spokes": 32 })).unwrap();
        assert_eq!(arguments.integer("spokes"), Some(32));
        assert_eq!(arguments.boolean("tubeless"), None);
        assert_eq!(arguments.text("spokes"), None, "of another kind");
    }

    #[test]
    fn invalid_value_is_rejected_with_the_allowed_ones() {
        let named = "expected name, spokes, tubeless, mask or tags";
        for (given, code, message) in [
            (
                json!({ "name": "rear", "spoke": 3 }),
                ErrorCode::NoSuchParameter,
                format!("set wheel: no parameter `spoke`, {named}"),
            ),
            (
                json!({ "name": "rear", "spokes": 100 }),
                ErrorCode::BadValue,
                "set wheel: spokes is 100, expected a whole number from 1 to 99".into(),
            ),
            (
                json!({ "spokes": 3 }),
                ErrorCode::MissingParameter,
                "set wheel: name is missing, expected a text of 1 to 8 bytes".into(),
            ),
        ] {
            assert_eq!(validate_test_arguments(given), Err((code, message)));
        }
        let refusal = METHOD.parameter("spoke").unwrap_err();
        assert_eq!(refusal.hint.as_deref(), Some("did you mean `spokes`?"));
        assert_eq!(METHOD.parameter("colour").unwrap_err().hint, None);
    }

    #[test]
    fn command_line_words_become_request_parameters() {
        let given = parse_command_line("name=a=b spokes=7 tubeless=off").unwrap();
        assert_eq!(Value::from(given), json!({ "name": "a=b", "spokes": 7, "tubeless": false }));
        let given = parse_command_line("name=a tags=a tags=b").unwrap();
        assert_eq!(Value::from(given), json!({ "name": "a", "tags": ["a", "b"] }));
        let given = json!({ "name": "a", "tags": ["a", "b"] });
        assert_eq!(validate_test_arguments(given).unwrap().texts("tags"), ["a", "b"]);
        assert_eq!(
            validate_test_arguments(json!({ "name": "a", "tags": "a" })).unwrap().texts("tags"),
            ["a"]
        );
        assert_eq!(validate_test_arguments(json!({ "name": "a" })).unwrap().texts("tags"), [""; 0]);
        for (line, message) in [
            (
                "front",
                "set wheel: `front` has no `=`, expected NAME=VALUE where NAME is name, spokes, \
                 tubeless, mask or tags",
            ),
            ("name=a tags= tags=b", "set wheel: tags is ``, expected a text of 1 to 4 bytes"),
            (
                "name=a tags=a tags=b tags=c",
                "set wheel: tags is a list, expected a text of 1 to 4 bytes, or a list of 1 to 2 of them",
            ),
            ("spokes=7", "set wheel: name is missing, expected a text of 1 to 8 bytes"),
            ("name=a name=b", "set wheel: name is given twice, expected once"),
            ("name=a tubeless=so", "set wheel: tubeless is `so`, expected true or false"),
            (
                "name=a nam=b",
                "set wheel: no parameter `nam`, expected name, spokes, tubeless, mask or tags",
            ),
        ] {
            assert_eq!(parse_command_line(line).unwrap_err(), message);
        }
    }
}
