//! What a command has to say of what it has done, to people and to programs.

use control::orders::Told;
use serde_json::json;

use super::super::hand::Hand;

/// The same for people, or for programs; and which process has done it, if that was another one.
pub(super) fn render(told: &Told, hand: &Hand<'_>, is_json: bool) -> String {
    if !is_json {
        return told.text.clone() + &hand.by();
    }
    let document =
        json!({ "changed": told.is_changed, "volume": told.volume, "process": hand.pid() });
    format!("{document:#}\n")
}
