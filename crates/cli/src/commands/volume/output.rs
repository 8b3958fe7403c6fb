//! Output of volume commands, as text or JSON.

use serde_json::json;
use tenmil_rpc::pool_commands::CommandResult;

use super::super::pool_access::PoolAccess;

/// Renders a result as text or JSON, with the process that executed the command if it was another one.
pub(super) fn render(told: &CommandResult, hand: &PoolAccess<'_>, is_json: bool) -> String {
    if !is_json {
        return told.text.clone() + &hand.by();
    }
    let document =
        json!({ "changed": told.is_changed, "volume": told.volume, "process": hand.pid() });
    format!("{document:#}\n")
}
