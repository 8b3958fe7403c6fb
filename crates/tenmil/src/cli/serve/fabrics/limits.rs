//! How many connections may be whose: what the arguments and the file say, as the target has it.

use control::configuration::{Configuration, ConnectionLimits, Line};
use target::tcp::Limits;

use super::Unfit;
use crate::Refused;
use crate::cli::serve::ServeArguments;

/// What the arguments say of connections.
pub(super) fn asked(arguments: &ServeArguments) -> ConnectionLimits {
    ConnectionLimits {
        connections: arguments.connections,
        per_address: arguments.connections_per_address,
        per_host: arguments.connections_per_host,
        ..ConnectionLimits::default()
    }
}

/// The limits of the target. `--connections` goes with a file as well, unless that says so itself.
pub(super) fn limits(arguments: &ServeArguments, asked: &Configuration) -> Result<Limits, Unfit> {
    let usual = Limits::default();
    let mut said = asked.limits.clone();
    if let (Some(switch), Some(_)) = (&arguments.config, said.connections)
        && arguments.connections.is_some()
    {
        let shown = switch.display();
        let text =
            format!("--connections is given and {shown} says it too, expected one of the two");
        return Err(Unfit { refused: Refused::caller(text), line: said.line, key: "limits" });
    }
    said.connections = arguments.connections.or(said.connections);
    let (connections_max, admission) = said.resolve();
    Ok(Limits {
        memory_bytes: asked.memory_bytes.unwrap_or(usual.memory_bytes),
        connections_max,
        admission: Some(admission),
        ..usual
    })
}

/// Whether limits are as they were at start.
pub(super) fn check_same(before: &Configuration, asked: &Configuration) -> Result<(), Unfit> {
    if before.limits == asked.limits {
        return Ok(());
    }
    let refused = Refused::caller("they are others, expected those at start")
        .with_hint("limits are taken once: start the process again for others");
    Err(Unfit { refused, line: Line(asked.limits.line.0.max(1)), key: "limits" })
}
