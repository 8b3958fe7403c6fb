//! Error for a missing volume, with similar names.

use tenmil_base::Error;
use tenmil_base::ErrorCategory;
use tenmil_drivers::pool::Info;

/// Largest number of suggested names.
const NAMES_MAX: usize = 3;

/// Error for deleting a volume `name` that does not exist.
pub(super) fn missing_volume_error(uri: &str, volumes: &[Info], name: &str) -> Error {
    let names = volumes.iter().map(|one| &*one.name);
    let near = similar_names(names, name);
    let expected = match near.as_slice() {
        [] => "one that `tenmil volume list` shows".to_owned(),
        near => near.iter().map(|near| format!("`{near}`")).collect::<Vec<_>>().join(" or "),
    };
    let text = format!("delete {uri}: no volume `{name}`, expected {expected}");
    let hint = "If it is no error that there is none, add --if-exists.";
    Error::new(ErrorCategory::Usage, text).with_hint(hint)
}

/// Closest names, best first: those within a third of the length in edit distance, and those of
/// which one is a prefix of the other.
fn similar_names<'a>(names: impl Iterator<Item = &'a str>, name: &str) -> Vec<&'a str> {
    let most = (name.chars().count() / 3).max(1);
    let mut near: Vec<(usize, &str)> = names
        .filter_map(|other| {
            let edits = edit_distance(&other.to_lowercase(), &name.to_lowercase());
            let begins = other.starts_with(name) || name.starts_with(other);
            (edits <= most || begins).then_some((edits, other))
        })
        .collect();
    near.sort_unstable();
    near.truncate(NAMES_MAX);
    near.into_iter().map(|(_, other)| other).collect()
}

/// Edit distance (Levenshtein).
fn edit_distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (above, from) in one.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], above + 1);
        for (at, to) in other.iter().enumerate() {
            let change = diagonal + usize::from(from != *to);
            diagonal = row[at + 1];
            row[at + 1] = change.min(diagonal + 1).min(row[at] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::{edit_distance, similar_names};

    #[test]
    fn edit_distance_is_counted() {
        for (one, other, expected) in
            [("", "", 0), ("db", "db", 0), ("db", "bd", 2), ("kitten", "sitting", 3), ("", "ab", 2)]
        {
            assert_eq!(
                (edit_distance(one, other), edit_distance(other, one)),
                (expected, expected)
            );
        }
    }

    #[test]
    fn similar_names_are_suggested_and_distant_ones_are_not() {
        let names = ["db", "db-old", "monday", "tuesday", "Trial"];
        for (name, expected) in [
            ("dv", vec!["db"]),
            ("db-", vec!["db", "db-old"]),
            ("mondy", vec!["monday"]),
            ("trail", vec![]),
            ("trial", vec!["Trial"]),
            ("x", vec![]),
        ] {
            assert_eq!(similar_names(names.into_iter(), name), expected, "{name}");
        }
    }
}
