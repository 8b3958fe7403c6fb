//! Elements of an array with the layout and the comments of the others.
//!
//! In TOML text a comment behind an element stands in front of the next one, or of the closing bracket:
//!
//! ```text
//!   allowed-hosts = [
//!       "nqn…one",   # prefix of two: " # …\n    "
//!       "nqn…two",   # trailing of the array: " # …\n"
//!   ]
//! ```

use toml_edit::{Array, Value};

/// Appends a value on a line of its own if the others have theirs.
pub(super) fn push_in_layout(array: &mut Array, value: impl Into<Value>) {
    let last = array.iter().last().map(prefix_of);
    let Some((_, indent)) = last.as_deref().and_then(|last| last.rsplit_once('\n')) else {
        array.push(value);
        return;
    };
    let mut value = value.into();
    let trailing = array.trailing().as_str().unwrap_or_default().to_owned();
    let (behind_last, end) = trailing.rsplit_once('\n').unwrap_or(("", ""));
    value.decor_mut().set_prefix(format!("{behind_last}\n{indent}"));
    value.decor_mut().set_suffix("");
    let end = format!("\n{end}");
    array.push_formatted(value);
    array.set_trailing_comma(true);
    array.set_trailing(end);
}

/// Removes an element, the comment behind it and the comment lines above it.
pub(super) fn remove_with_comment(array: &mut Array, at: usize) {
    let removed = array.remove(at);
    let removed = prefix_of(&removed);
    // The comment behind the previous element stays.
    let kept = removed.split('\n').next().unwrap_or_default().to_owned();
    let rest = |behind: &str| behind.find('\n').map(|end| behind[end..].to_owned());
    match array.get_mut(at) {
        Some(next) => {
            let behind = prefix_of(next);
            let prefix = rest(&behind).map_or(removed.clone(), |rest| kept + &rest);
            next.decor_mut().set_prefix(prefix);
        }
        None => {
            let trailing = array.trailing().as_str().unwrap_or_default().to_owned();
            if let Some(rest) = rest(&trailing) {
                array.set_trailing(kept + &rest);
            }
        }
    }
}

fn prefix_of(value: &Value) -> String {
    let prefix = value.decor().prefix().and_then(|prefix| prefix.as_str());
    prefix.unwrap_or_default().to_owned()
}
