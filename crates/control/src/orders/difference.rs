//! What a volume has that another has not, a portion at a time: a large volume that was written all over
//! has more ranges than anybody wants to keep waiting in a process that serves.

use std::sync::Arc;

use block::MediumError;
use block::store::{Changed, OpenStore, PAGE_BYTES};
use serde_json::{Value, json};

use crate::shape::{Field, Shape};

const RANGE: &[Field] = &[
    Field::new("offset_bytes", Shape::Whole, "where it begins in the volume"),
    Field::new("length_bytes", Shape::Whole, "how long it is"),
    Field::new("kind", Shape::Text, "data, parent or hole: what it is now"),
];

/// What is told of a difference.
pub const DIFFERENCE: &[Field] = &[
    Field::new("from_uuid", Shape::Text, "which volume the one is"),
    Field::new("to_uuid", Shape::Text, "which volume the other is"),
    Field::new("changed", Shape::Rows(RANGE), "ranges of it, by ascending offsets"),
    Field::new(
        "next_bytes",
        Shape::Maybe(&Shape::Whole),
        "where to go on if there may be more: the next at_bytes",
    ),
];

/// Some ranges in which a volume differs from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Portion {
    /// Which volumes they are: a name may go to another one between two portions.
    pub uuids: [String; 2],
    /// The ranges.
    pub changed: Vec<Changed>,
    /// Where to go on if there may be more.
    pub next_bytes: Option<u64>,
}

/// Ranges in one portion: less than 400 KiB of text.
const RANGES_MAX: usize = 4096;

const PAGE: u64 = PAGE_BYTES as u64;

impl Portion {
    /// What the second of two volumes has from a byte on that the first has not.
    ///
    /// # Errors
    ///
    /// If one of them is not there, or a map is damaged.
    pub fn of(
        open: &Arc<OpenStore>,
        (from, to): (&str, &str),
        at_bytes: u64,
    ) -> Result<Self, MediumError> {
        let (from, to) = (open.find(from)?, open.find(to)?);
        let (changed, next) =
            open.differences_from(Some(&from), &to, at_bytes / PAGE, RANGES_MAX)?;
        let uuids = [from, to].map(|info| format!("{:032x}", info.uuid));
        Ok(Self { uuids, changed, next_bytes: next.map(|block| block * PAGE) })
    }

    /// As it stands in an answer.
    pub fn as_json(&self) -> Value {
        let range = |range: &Changed| {
            json!({
                "offset_bytes": range.block * PAGE,
                "length_bytes": range.blocks * PAGE,
                "kind": kind(range),
            })
        };
        json!({
            "from_uuid": self.uuids[0],
            "to_uuid": self.uuids[1],
            "changed": self.changed.iter().map(range).collect::<Vec<Value>>(),
            "next_bytes": self.next_bytes,
        })
    }

    /// Reads an answer. `None` if it is none.
    pub fn from_json(answer: &Value) -> Option<Self> {
        let range = |range: &Value| {
            let blocks = |name: &str| Some(range.get(name)?.as_u64()? / PAGE);
            let (is_mapped, is_parents) = match range.get("kind")?.as_str()? {
                "data" => (true, false),
                "parent" => (false, true),
                "hole" => (false, false),
                _ => return None,
            };
            let (block, blocks) = (blocks("offset_bytes")?, blocks("length_bytes")?);
            Some(Changed { block, blocks, is_mapped, is_parents })
        };
        let uuid = |name: &str| Some(answer.get(name)?.as_str()?.to_owned());
        let changed = answer.get("changed")?.as_array()?.iter().map(range);
        Some(Self {
            uuids: [uuid("from_uuid")?, uuid("to_uuid")?],
            changed: changed.collect::<Option<_>>()?,
            next_bytes: answer.get("next_bytes")?.as_u64(),
        })
    }
}

/// What a range is, in a word.
pub const fn kind(range: &Changed) -> &'static str {
    match (range.is_mapped, range.is_parents) {
        (true, _) => "data",
        (false, true) => "parent",
        (false, false) => "hole",
    }
}

#[cfg(test)]
mod tests {
    use block::store::Changed;

    use super::{DIFFERENCE, Portion};
    use crate::shape::Shape;

    #[test]
    fn a_portion_is_read_as_it_was_told() {
        let of = |block, is_mapped, is_parents| Changed { block, blocks: 3, is_mapped, is_parents };
        let changed = vec![of(0, true, false), of(3, false, true), of(9, false, false)];
        for next_bytes in [None, Some(12 * 4096)] {
            let uuids = ["a", "b"].map(String::from);
            let portion = Portion { uuids, changed: changed.clone(), next_bytes };
            let json = portion.as_json();
            assert_eq!(Shape::Record(DIFFERENCE).check(&json), Ok(()));
            assert_eq!(Portion::from_json(&json), Some(portion));
        }
        let mut json = Portion { uuids: Default::default(), changed, next_bytes: None }.as_json();
        json["changed"][1]["kind"] = "other".into();
        assert_eq!(Portion::from_json(&json), None);
    }
}
