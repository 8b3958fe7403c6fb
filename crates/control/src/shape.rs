//! What an answer looks like: said once, and used by the schema, the documentation, the tables for
//! people, and the tests that hold every row to its word.

use serde_json::{Map, Value, json};

/// What a value of an answer looks like.
///
/// The unit of a number is the end of its name: `_ns`, `_bytes`, `_percent`.
#[derive(Clone, Copy, Debug)]
pub enum Shape {
    /// A text.
    Text,
    /// True or false.
    Flag,
    /// A whole number.
    Whole,
    /// A number.
    Real,
    /// A list of texts.
    Texts,
    /// A list of whole numbers.
    Wholes,
    /// An object with these members and no others.
    Record(&'static [Field]),
    /// A list of such objects.
    Rows(&'static [Field]),
    /// One of these, or null for "not known" or "none".
    Maybe(&'static Shape),
    /// An object of any form, which is described elsewhere.
    Object,
}

/// A member of an answer.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// What it looks like.
    pub shape: Shape,
    /// What it says, as half a sentence.
    pub help: &'static str,
}

impl Field {
    /// A member.
    pub const fn new(name: &'static str, shape: Shape, help: &'static str) -> Self {
        Self { name, shape, help }
    }
}

impl Shape {
    /// Whether a value has this shape. The error says where it has not.
    pub fn check(&self, value: &Value) -> Result<(), String> {
        let fits = match (self, value) {
            (Self::Text, Value::String(_))
            | (Self::Flag, Value::Bool(_))
            | (Self::Real, Value::Number(_))
            | (Self::Maybe(_), Value::Null)
            | (Self::Object, Value::Object(_)) => true,
            (Self::Whole, number) => number.is_u64() || number.is_i64(),
            (Self::Texts, Value::Array(list)) => list.iter().all(Value::is_string),
            (Self::Wholes, Value::Array(list)) => list.iter().all(Value::is_u64),
            (Self::Maybe(shape), value) => return shape.check(value),
            (Self::Record(fields), Value::Object(record)) => return check_record(fields, record),
            (Self::Rows(fields), Value::Array(rows)) => {
                for (index, row) in rows.iter().enumerate() {
                    let row = Self::Record(fields).check(row);
                    row.map_err(|wrong| format!("{index}: {wrong}"))?;
                }
                true
            }
            _ => false,
        };
        if fits { Ok(()) } else { Err(format!("{value} is not {}", self.name())) }
    }

    /// Its JSON schema.
    pub fn schema(&self) -> Value {
        match self {
            Self::Text => json!({ "type": "string" }),
            Self::Flag => json!({ "type": "boolean" }),
            Self::Whole => json!({ "type": "integer" }),
            Self::Real => json!({ "type": "number" }),
            Self::Texts => json!({ "type": "array", "items": { "type": "string" } }),
            Self::Wholes => json!({ "type": "array", "items": { "type": "integer" } }),
            Self::Record(fields) => record_schema(fields),
            Self::Rows(fields) => json!({ "type": "array", "items": record_schema(fields) }),
            Self::Maybe(shape) => json!({ "anyOf": [shape.schema(), { "type": "null" }] }),
            Self::Object => json!({ "type": "object" }),
        }
    }

    /// What it is, for people.
    pub fn name(&self) -> String {
        match self {
            Self::Text => "text".into(),
            Self::Flag => "true or false".into(),
            Self::Whole => "whole number".into(),
            Self::Real => "number".into(),
            Self::Texts => "list of texts".into(),
            Self::Wholes => "list of whole numbers".into(),
            Self::Record(_) | Self::Object => "object".into(),
            Self::Rows(_) => "list of objects".into(),
            Self::Maybe(shape) => format!("{} or null", shape.name()),
        }
    }

    /// What it is, with its article.
    pub(crate) fn article(&self) -> String {
        let name = self.name();
        if name.starts_with('o') { format!("an {name}") } else { format!("a {name}") }
    }

    /// The members that are described, if it has any.
    pub fn fields(&self) -> &'static [Field] {
        match self {
            Self::Record(fields) | Self::Rows(fields) => fields,
            Self::Maybe(shape) => shape.fields(),
            _ => &[],
        }
    }
}

fn check_record(fields: &[Field], record: &Map<String, Value>) -> Result<(), String> {
    for field in fields {
        let value = record.get(field.name).ok_or_else(|| format!("{} is missing", field.name))?;
        field.shape.check(value).map_err(|wrong| format!("{}: {wrong}", field.name))?;
    }
    let described = |name: &String| fields.iter().any(|field| field.name == name);
    match record.keys().find(|name| !described(name)) {
        Some(name) => Err(format!("{name} is not described")),
        None => Ok(()),
    }
}

fn record_schema(fields: &[Field]) -> Value {
    let described = |field: &Field| {
        let mut schema = field.shape.schema();
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

    use super::{Field, Shape};

    const SHAPE: Shape = Shape::Rows(&[
        Field::new("name", Shape::Text, "its name"),
        Field::new("age_ns", Shape::Maybe(&Shape::Whole), "its age"),
        Field::new(
            "inner",
            Shape::Record(&[Field::new("share", Shape::Real, "a share")]),
            "more of it",
        ),
    ]);

    #[test]
    fn an_answer_is_held_to_its_shape_member_by_member() {
        let good = json!([
            { "name": "a", "age_ns": 1, "inner": { "share": 0.5 } },
            { "name": "b", "age_ns": null, "inner": { "share": 1 } },
        ]);
        assert_eq!(SHAPE.check(&good), Ok(()));
        assert_eq!(SHAPE.check(&json!([])), Ok(()));
        for (change, wrong) in [
            (json!({ "name": 1 }), "0: name: 1 is not text"),
            (json!({ "age_ns": 1.5 }), "0: age_ns: 1.5 is not whole number"),
            (json!({ "inner": {} }), "0: inner: share is missing"),
            (json!({ "other": 1 }), "0: other is not described"),
        ] {
            let mut rows = good.clone();
            let row = rows[0].as_object_mut().unwrap();
            row.extend(change.as_object().unwrap().clone());
            assert_eq!(SHAPE.check(&rows), Err(wrong.into()));
        }
        assert_eq!(SHAPE.check(&json!({})), Err("{} is not list of objects".into()));
    }

    #[test]
    fn the_schema_says_the_same() {
        let schema = SHAPE.schema();
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
