//! Identify data as JSON.

use serde_json::{Map, Value as Json, json};
use tenmil_devices::identify::show::without_trailing_zeroes;
use tenmil_devices::identify::{IdentifyDocument, Section};
use tenmil_wire::layout::{DecodedField, FieldValue};

/// Renders the document as JSON, nested by path. Lists end with their last nonzero value.
pub(super) fn document_json(document: &IdentifyDocument) -> String {
    let mut root = Map::new();
    for section in &document.sections {
        insert(&mut root, section);
    }
    let rejected: Vec<Json> = document
        .rejected
        .iter()
        .map(|(title, status)| json!({ "what": title, "status": status.to_string() }))
        .collect();
    root.insert("rejected".into(), rejected.into());
    format!("{:#}\n", Json::Object(root))
}

fn insert(root: &mut Map<String, Json>, section: &Section) {
    let (last, parents) = section.path.split_last().expect("a section has a place");
    let mut object = root;
    for parent in parents {
        let child = object.entry(parent.as_str()).or_insert_with(|| json!({}));
        object = child.as_object_mut().expect("sections are leaves, and have no children");
    }
    object.insert(last.clone(), fields_json(&section.fields));
}

fn fields_json(fields: &[DecodedField]) -> Json {
    let mut object = Map::new();
    for field in fields {
        object.insert(field.name.into(), value_json(&field.value));
        // The parts of a word become siblings of it: all names within a structure are different.
        for part in &field.parts {
            object.insert(part.name.into(), value_json(&part.value));
        }
    }
    Json::Object(object)
}

fn value_json(value: &FieldValue) -> Json {
    match value {
        FieldValue::Flag(flag) => json!(flag),
        // Most JSON readers round integers wider than 64 bits, so those are strings.
        FieldValue::Number(number) => match u64::try_from(*number) {
            Ok(number) => json!(number),
            Err(_) => json!(number.to_string()),
        },
        FieldValue::Code(code, name) => {
            json!({ "code": code, "name": name.trim_end_matches('.') })
        }
        FieldValue::Text(text) => json!(text),
        FieldValue::Bytes(_) => json!(value.to_string()),
        FieldValue::Structure(fields) => fields_json(fields),
        FieldValue::List(values) => {
            without_trailing_zeroes(values).iter().map(value_json).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};
    use tenmil_devices::identify::{IdentifyDocument, Section};
    use tenmil_wire::Status;
    use tenmil_wire::layout::{DecodedField, FieldValue};

    use super::document_json;

    fn field(name: &'static str, value: FieldValue, parts: Vec<DecodedField>) -> DecodedField {
        DecodedField { name, description: "Described.", value, parts }
    }

    #[test]
    fn fields_are_nested_by_path_with_the_parts_of_words_beside_them() {
        let number = FieldValue::Number;
        let bit = vec![field("bit", FieldValue::Flag(true), vec![])];
        let fields = vec![
            field("word", number(3), bit),
            field("wide", number(1 << 70), vec![]),
            field("code", FieldValue::Code(2, "Second."), vec![]),
            field("text", FieldValue::Text("x\"y".into()), vec![]),
            field("id", FieldValue::Bytes(vec![9, 10]), vec![]),
            field(
                "list",
                FieldValue::List(vec![number(1), number(0), number(7), number(0)]),
                vec![],
            ),
        ];
        let path = ["namespaces", "1", "identify"].map(str::to_owned).to_vec();
        let other = ["namespaces", "1", "descriptors"].map(str::to_owned).to_vec();
        let mut document = IdentifyDocument::default();
        document.sections.push(Section { path, title: "A".into(), fields });
        document.sections.push(Section { path: other, title: "B".into(), fields: vec![] });
        document.rejected.push(("Feature 01h".into(), Status::INVALID_FIELD));
        let found: Json = serde_json::from_str(&document_json(&document)).expect("JSON");
        let expected = json!({
            "namespaces": { "1": {
                "identify": {
                    "word": 3, "bit": true, "wide": "1180591620717411303424",
                    "code": { "code": 2, "name": "Second" },
                    "text": "x\"y", "id": "090a", "list": [1, 0, 7],
                },
                "descriptors": {},
            } },
            "rejected": [{
                "what": "Feature 01h", "status": Status::INVALID_FIELD.to_string(),
            }],
        });
        assert_eq!(found, expected);
    }
}
