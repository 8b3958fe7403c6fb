//! `tenmil group status|drain|rebalance`: the gateway group of a running target.

use std::io::Write;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use tenmil_base::Error;
use tenmil_rpc::MethodKind;

use super::get::call_method;
use super::rpc_endpoint::ProcessSelector;
use super::write_stdout;

/// Show the gateway group of a running target, or move its ANA groups.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct GroupArguments {
    #[command(subcommand)]
    command: GroupCommand,
}

#[derive(Debug, Subcommand)]
enum GroupCommand {
    /// Show the members, and the owner of each ANA group
    Status(MemberArguments),
    /// Move the ANA groups of this gateway to the others, for maintenance
    Drain(MemberArguments),
    /// End the drain of this gateway: it gets its share of the ANA groups again
    Rebalance(MemberArguments),
}

#[derive(Debug, Args)]
struct MemberArguments {
    #[command(flatten)]
    process: ProcessSelector,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil group status                    members and owners
  tenmil group drain --instance a        its ANA groups move to the others
  tenmil group rebalance --instance a    it gets its share again

`tenmil group status` shows when a drained gateway owns no ANA group.

A gateway that is started again is not draining. docs/operator/gateway-group.md describes the group.";

/// Calls the method and prints the state of the group.
pub(super) fn run_group(
    arguments: &GroupArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let (kind, parameters, member) = match &arguments.command {
        GroupCommand::Status(member) => (MethodKind::Get, vec![], member),
        GroupCommand::Drain(member) => (MethodKind::Set, vec!["draining=true".to_owned()], member),
        GroupCommand::Rebalance(member) => {
            (MethodKind::Set, vec!["draining=false".to_owned()], member)
        }
    };
    write_stdout(out, &call_method(kind, "group", &parameters, &member.process, member.json)?)?;
    Ok(ExitCode::SUCCESS)
}
