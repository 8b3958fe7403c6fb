//! JSON schema of the method table.

use serde_json::{Map, Value, json};

use crate::method::{Method, MethodRegistry, ParamDefault, Parameter};

/// Schema of a table: for each method, by its request name, the description and the JSON schemas of
/// parameters and result.
pub fn table_schema(table: &MethodRegistry) -> Value {
    let methods: Map<String, Value> =
        table.methods().map(|method| (method.request_name(), method_schema(method))).collect();
    json!({ "$schema": "https://json-schema.org/draft/2020-12/schema", "methods": methods })
}

fn method_schema(method: &Method) -> Value {
    json!({
        "verb": method.verb.name(),
        "help": method.help,
        "example": method.example,
        "parameters": parameters_schema(&method.parameters.iter().collect::<Vec<_>>()),
        "answer": method.answer.json_schema(),
    })
}

/// Schema of an object with these parameters.
pub(crate) fn parameters_schema(parameters: &[&Parameter]) -> Value {
    let properties: Map<String, Value> = parameters
        .iter()
        .map(|parameter| {
            let mut schema = parameter.kind.json_schema();
            schema["description"] = parameter.help.into();
            if let ParamDefault::Default(text) = parameter.need
                && let Ok(value) = parameter.kind.parse_text(text)
            {
                schema["default"] = value;
            }
            (parameter.name.to_owned(), schema)
        })
        .collect();
    let required = parameters.iter().filter(|parameter| parameter.need == ParamDefault::Required);
    let required: Vec<&str> = required.map(|parameter| parameter.name).collect();
    json!({
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": false,
    })
}
