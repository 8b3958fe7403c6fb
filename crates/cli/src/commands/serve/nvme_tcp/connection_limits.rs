//! Connection limits of the NVMe/TCP target, from arguments and configuration file.

use tenmil_rpc::target_config::{ConnectionLimits, IgnoredLineNumber, TargetConfig};
use tenmil_serve::tcp::ServiceLimits;

use super::ApplyError;
use crate::commands::serve::ServeArguments;
use tenmil_base::Error;

/// Connection limits given as arguments.
pub(super) fn limits_of_arguments(arguments: &ServeArguments) -> ConnectionLimits {
    ConnectionLimits {
        connections: arguments.max_connections,
        per_address: arguments.connections_per_address,
        per_host: arguments.connections_per_host,
        ..ConnectionLimits::default()
    }
}

/// Limits of the target. `--max-connections` also applies with a file that does not set that limit itself.
pub(super) fn service_limits(
    arguments: &ServeArguments,
    requested: &TargetConfig,
) -> Result<ServiceLimits, ApplyError> {
    let usual = ServiceLimits::default();
    let mut said = requested.limits.clone();
    if let (Some(switch), Some(_)) = (&arguments.config, said.connections)
        && arguments.max_connections.is_some()
    {
        let shown = switch.display();
        let text =
            format!("--max-connections is given and {shown} has it too, expected one of the two");
        return Err(ApplyError { refused: Error::usage(text), line: said.line, key: "limits" });
    }
    said.connections = arguments.max_connections.or(said.connections);
    let (connections_max, admission) = said.completed_with_defaults();
    Ok(ServiceLimits {
        memory_bytes: requested.memory_bytes.unwrap_or(usual.memory_bytes),
        connections_max,
        admission: Some(admission),
        fair_depth: said.fair_depth.unwrap_or(usual.fair_depth),
        ..usual
    })
}

/// Checks that the limits equal those at start, as they cannot change at run time.
pub(super) fn check_limits_unchanged(
    before: &TargetConfig,
    requested: &TargetConfig,
) -> Result<(), ApplyError> {
    if before.limits == requested.limits {
        return Ok(());
    }
    let refused = Error::usage("they are others, expected those at start")
        .with_hint("limits are taken once: start the process again for others");
    Err(ApplyError {
        refused,
        line: IgnoredLineNumber(requested.limits.line.0.max(1)),
        key: "limits",
    })
}
