//! Output of volume commands, as text or JSON.

use serde_json::json;
use tenmil_rpc::pool_commands::CommandResult;

use super::super::pool_access::PoolAccess;

/// Renders a result as text or JSON, with the process that executed the command if it was another one.
pub(super) fn render_result(
    result: &CommandResult,
    access: &PoolAccess<'_>,
    is_json: bool,
) -> String {
    if !is_json {
        return result.text.clone() + &access.owner_line();
    }
    let document = json!({ "changed": result.is_changed, "volume": result.volume, "process": access.owner_pid() });
    format!("{document:#}\n")
}
