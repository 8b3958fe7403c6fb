//! Types of results: declared once, and used by the schema, the documentation, the tables and the
//! tests.

use serde_json::{Map, Value, json};

/// Type of a result value.
///
/// The suffix of a number's name is its unit: `_ns`, `_bytes`, `_percent`.
#[derive(Clone, Copy, Debug)]
pub enum ResultType {
    /// Text.
    Text,
    /// Boolean.
    Flag,
    /// Integer.
    Whole,
    /// Number.
    Real,
    /// List of texts.
    Texts,
    /// List of integers.
    Wholes,
    /// Object with exactly these members.
    Record(&'static [FieldSchema]),
    /// List of such objects.
    Rows(&'static [FieldSchema]),
    /// Value of this type, or null if it is unknown or absent.
    Maybe(&'static ResultType),
    /// Object that is described elsewhere.
    Object,
}

/// Member of a result object.
#[derive(Clone, Copy, Debug)]
pub struct FieldSchema {
    /// Name.
    pub name: &'static str,
    /// Type.
    pub geometry: ResultType,
    /// Description, as a phrase.
    pub help: &'static str,
}

impl FieldSchema {
    /// Creates a member.
    pub const fn new(name: &'static str, geometry: ResultType, help: &'static str) -> Self {
        Self { name, geometry, help }
    }
}

impl ResultType {
    /// Checks a value against the type. The error names the first mismatch.
    pub fn check_value(&self, value: &Value) -> Result<(), String> {
        let fits = match (self, value) {
            (Self::Text, Value::String(_))
            | (Self::Flag, Value::Bool(_))
            | (Self::Real, Value::Number(_))
            | (Self::Maybe(_), Value::Null)
            | (Self::Object, Value::Object(_)) => true,
            (Self::Whole, number) => number.is_u64() || number.is_i64(),
            (Self::Texts, Value::Array(list)) => list.iter().all(Value::is_string),
            (Self::Wholes, Value::Array(list)) => list.iter().all(Value::is_u64),
            (Self::Maybe(geometry), value) => return geometry.check_value(value),
            (Self::Record(fields), Value::Object(record)) => return check_record(fields, record),
            (Self::Rows(fields), Value::Array(rows)) => {
                for (index, row) in rows.iter().enumerate() {
                    let row = Self::Record(fields).check_value(row);
                    row.map_err(|wrong| format!("{index}: {wrong}"))?;
                }
                true
            }
            _ => false,
        };
        if fits { Ok(()) } else { Err(format!("{value} is not {}", self.type_name())) }
    }

    /// JSON schema of the type.
    pub fn json_schema(&self) -> Value {
        match self {
            Self::Text => json!({ "type": "string" }),
            Self::Flag => json!({ "type": "boolean" }),
            Self::Whole => json!({ "type": "integer" }),
            Self::Real => json!({ "type": "number" }),
            Self::Texts => json!({ "type": "array", "items": { "type": "string" } }),
            Self::Wholes => json!({ "type": "array", "items": { "type": "integer" } }),
            Self::Record(fields) => record_schema(fields),
            Self::Rows(fields) => json!({ "type": "array", "items": record_schema(fields) }),
            Self::Maybe(geometry) => {
                json!({ "anyOf": [geometry.json_schema(), { "type": "null" }] })
            }
            Self::Object => json!({ "type": "object" }),
        }
    }

    /// Name of the type in the documentation.
    pub fn type_name(&self) -> String {
        match self {
            Self::Text => "text".into(),
            Self::Flag => "true or false".into(),
            Self::Whole => "whole number".into(),
            Self::Real => "number".into(),
            Self::Texts => "list of texts".into(),
            Self::Wholes => "list of whole numbers".into(),
            Self::Record(_) | Self::Object => "object".into(),
            Self::Rows(_) => "list of objects".into(),
            Self::Maybe(geometry) => format!("{} or null", geometry.type_name()),
        }
    }

    /// Name of the type with its article.
    pub(crate) fn name_with_article(&self) -> String {
        let name = self.type_name();
        if name.starts_with('o') { format!("an {name}") } else { format!("a {name}") }
    }

    /// Declared members, if any.
    pub fn declared_fields(&self) -> &'static [FieldSchema] {
        match self {
            Self::Record(fields) | Self::Rows(fields) => fields,
            Self::Maybe(geometry) => geometry.declared_fields(),
            _ => &[],
        }
    }
}

fn check_record(fields: &[FieldSchema], record: &Map<String, Value>) -> Result<(), String> {
    for field in fields {
        let value = record.get(field.name).ok_or_else(|| format!("{} is missing", field.name))?;
        field.geometry.check_value(value).map_err(|wrong| format!("{}: {wrong}", field.name))?;
    }
    let described = |name: &String| fields.iter().any(|field| field.name == name);
    match record.keys().find(|name| !described(name)) {
        Some(name) => Err(format!("{name} is not described")),
        None => Ok(()),
    }
}

fn record_schema(fields: &[FieldSchema]) -> Value {
    let described = |field: &FieldSchema| {
        let mut schema = field.geometry.json_schema();
        schema["description"] = field.help.into();
        (field.name.to_owned(), schema)
    };
    let properties: Map<_, _> = fields.iter().map(described).collect();
    let required: Vec<_> = fields.iter().map(|field| field.name).collect();
    json!({
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": false,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{FieldSchema, ResultType};

    const SHAPE: ResultType = ResultType::Rows(&[
        FieldSchema::new("name", ResultType::Text, "its name"),
        FieldSchema::new("age_ns", ResultType::Maybe(&ResultType::Whole), "its age"),
        FieldSchema::new(
            "inner",
            ResultType::Record(&[FieldSchema::new("share", ResultType::Real, "a share")]),
            "more of it",
        ),
    ]);

    #[test]
    fn result_is_checked_member_by_member_against_its_type() {
        let good = json!([
            { "name": "a", "age_ns": 1, "inner": { "share": 0.5 } },
            { "name": "b", "age_ns": null, "inner": { "share": 1 } },
        ]);
        assert_eq!(SHAPE.check_value(&good), Ok(()));
        assert_eq!(SHAPE.check_value(&json!([])), Ok(()));
        for (change, wrong) in [
            (json!({ "name": 1 }), "0: name: 1 is not text"),
            (json!({ "age_ns": 1.5 }), "0: age_ns: 1.5 is not whole number"),
            (json!({ "inner": {} }), "0: inner: share is missing"),
            (json!({ "other": 1 }), "0: other is not described"),
        ] {
            let mut rows = good.clone();
            let row = rows[0].as_object_mut().unwrap();
            row.extend(change.as_object().unwrap().clone());
            assert_eq!(SHAPE.check_value(&rows), Err(wrong.into()));
        }
        assert_eq!(SHAPE.check_value(&json!({})), Err("{} is not list of objects".into()));
    }

    #[test]
    fn json_schema_matches_the_result_type() {
        let schema = SHAPE.json_schema();
        let row = &schema["items"];
        assert_eq!(row["required"], json!(["name", "age_ns", "inner"]));
        assert_eq!(row["additionalProperties"], json!(false));
        assert_eq!(
            row["properties"]["name"],
            json!({ "type": "string", "description": "its name" })
        );
        assert_eq!(row["properties"]["age_ns"]["anyOf"][1]["type"], "null");
    }
}
