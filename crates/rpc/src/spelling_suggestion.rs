//! Suggestions for misspelled names.

/// Returns the known name closest to `found`, if its edit distance is at most a third of its
/// length.
pub(crate) fn nearest_name<'a>(
    found: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let found: Vec<char> = found.chars().take(NAME_MAX + 1).collect();
    if found.len() > NAME_MAX {
        return None;
    }
    let near = |name: &'a str| {
        let letters: Vec<char> = name.chars().collect();
        let away = edit_distance(&found, &letters);
        (away <= 1.max(letters.len() / 3)).then_some((away, name))
    };
    known.into_iter().filter_map(near).min_by_key(|(away, _)| *away).map(|(_, name)| name)
}

/// Longest input that is compared; a longer one is not a typing error of a known name.
const NAME_MAX: usize = 64;

/// Edit distance with insertion, deletion, substitution and transposition of neighbors.
fn edit_distance(from: &[char], to: &[char]) -> usize {
    let mut before = Vec::new();
    let mut above: Vec<usize> = (0..=to.len()).collect();
    for (row, left) in from.iter().enumerate() {
        let mut here = vec![row + 1];
        for (column, right) in to.iter().enumerate() {
            let exchange = above[column] + usize::from(left != right);
            let mut least = exchange.min(above[column + 1] + 1).min(here[column] + 1);
            let crossed =
                row > 0 && column > 0 && *left == to[column - 1] && from[row - 1] == *right;
            if crossed {
                let before: &Vec<usize> = &before;
                least = least.min(before[column - 1] + 1);
            }
            here.push(least);
        }
        before = std::mem::replace(&mut above, here);
    }
    above[to.len()]
}

#[cfg(test)]
mod tests {
    use super::{edit_distance, nearest_name};

    fn distance_of_texts(from: &str, to: &str) -> usize {
        let letters = |text: &str| text.chars().collect::<Vec<_>>();
        edit_distance(&letters(from), &letters(to))
    }

    #[test]
    fn edit_distance_counts_typing_errors() {
        for (from, to, slips) in [
            ("poll", "poll", 0),
            ("pol", "poll", 1),
            ("polll", "poll", 1),
            ("pool", "poll", 1),
            ("plol", "poll", 1),
            ("", "poll", 4),
            ("reactor", "reactors", 1),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(distance_of_texts(from, to), slips, "{from} {to}");
            assert_eq!(distance_of_texts(to, from), slips, "{to} {from}");
        }
    }

    #[test]
    fn nearest_name_is_suggested_and_distant_names_are_not() {
        let known = ["process", "pollers", "poll"];
        assert_eq!(nearest_name("proces", known), Some("process"));
        assert_eq!(nearest_name("plol", known), Some("poll"));
        assert_eq!(nearest_name("poller", known), Some("pollers"));
        assert_eq!(nearest_name("volumes", known), None);
        assert_eq!(nearest_name(&"p".repeat(100_000), known), None);
    }
}
