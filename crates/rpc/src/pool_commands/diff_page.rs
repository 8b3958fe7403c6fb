//! Differences between two volumes, one page at a time: a large fragmented volume has more ranges
//! than a single response should hold.

use std::sync::Arc;

use serde_json::{Value, json};
use tenmil_base::Error;
use tenmil_drivers::pool::{ChangedRange, OpenPool, PAGE_BYTES};

use crate::result_type::{FieldSchema, ResultType};

const RANGE: &[FieldSchema] = &[
    FieldSchema::new("offset_bytes", ResultType::Whole, "offset in the volume"),
    FieldSchema::new("length_bytes", ResultType::Whole, "length"),
    FieldSchema::new("kind", ResultType::Text, "kind of the range: data, parent or hole"),
];

/// Members of a difference page.
pub const DIFFERENCE: &[FieldSchema] = &[
    FieldSchema::new("from_uuid", ResultType::Text, "UUID of the earlier volume"),
    FieldSchema::new("to_uuid", ResultType::Text, "UUID of the later volume"),
    FieldSchema::new("changed", ResultType::Rows(RANGE), "ranges that differ, by ascending offset"),
    FieldSchema::new(
        "next_bytes",
        ResultType::Maybe(&ResultType::Whole),
        "at_bytes of the next call, if there may be more ranges",
    ),
];

/// Page of ranges in which a volume differs from another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiffPage {
    /// UUIDs of the volumes: between two pages a name may be assigned to another volume.
    pub uuids: [String; 2],
    /// Ranges.
    pub changed: Vec<ChangedRange>,
    /// Start of the next page, if there may be more ranges.
    pub next_bytes: Option<u64>,
}

/// Largest number of ranges on a page: less than 400 KiB of text.
const RANGES_MAX: usize = 4096;

const PAGE: u64 = PAGE_BYTES as u64;

impl DiffPage {
    /// Returns the ranges of the second volume that differ from the first, starting at `at_bytes`.
    ///
    /// # Errors
    ///
    /// If a volume does not exist or a map is damaged.
    pub fn read_page(
        open: &Arc<OpenPool>,
        (from, to): (&str, &str),
        at_bytes: u64,
    ) -> Result<Self, Error> {
        let (from, to) = (open.find_volume(from)?, open.find_volume(to)?);
        let (changed, next) =
            open.first_differences(Some(&from), &to, at_bytes / PAGE, RANGES_MAX)?;
        let uuids = [from, to].map(|info| format!("{:032x}", info.uuid));
        Ok(Self { uuids, changed, next_bytes: next.map(|block| block * PAGE) })
    }

    /// JSON value of the page.
    pub fn as_json(&self) -> Value {
        let range = |range: &ChangedRange| {
            json!({
                "offset_bytes": range.block * PAGE,
                "length_bytes": range.blocks * PAGE,
                "kind": range_kind(range),
            })
        };
        json!({
            "from_uuid": self.uuids[0],
            "to_uuid": self.uuids[1],
            "changed": self.changed.iter().map(range).collect::<Vec<Value>>(),
            "next_bytes": self.next_bytes,
        })
    }

    /// Parses a page. `None` if it is malformed.
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
            Some(ChangedRange { block, blocks, is_mapped, is_parents })
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

/// Kind of a range: `data`, `parent` or `hole`.
pub const fn range_kind(range: &ChangedRange) -> &'static str {
    match (range.is_mapped, range.is_parents) {
        (true, _) => "data",
        (false, true) => "parent",
        (false, false) => "hole",
    }
}

#[cfg(test)]
mod tests {
    use tenmil_drivers::pool::ChangedRange;

    use super::{DIFFERENCE, DiffPage};
    use crate::result_type::ResultType;

    #[test]
    fn diff_page_is_read_back_from_json() {
        let of =
            |block, is_mapped, is_parents| ChangedRange { block, blocks: 3, is_mapped, is_parents };
        let changed = vec![of(0, true, false), of(3, false, true), of(9, false, false)];
        for next_bytes in [None, Some(12 * 4096)] {
            let uuids = ["a", "b"].map(String::from);
            let portion = DiffPage { uuids, changed: changed.clone(), next_bytes };
            let json = portion.as_json();
            assert_eq!(ResultType::Record(DIFFERENCE).check_value(&json), Ok(()));
            assert_eq!(DiffPage::from_json(&json), Some(portion));
        }
        let mut json = DiffPage { uuids: Default::default(), changed, next_bytes: None }.as_json();
        json["changed"][1]["kind"] = "other".into();
        assert_eq!(DiffPage::from_json(&json), None);
    }
}
