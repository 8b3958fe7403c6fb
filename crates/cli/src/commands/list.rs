//! `tenmil list`: lists SSDs and block device kinds.

mod follow;
mod nvme_functions;

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use tenmil_base::{Error, Span};
use tenmil_block::quantity_parser::parse_time;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::process_stats::command_line;
use tenmil_linux::running_processes::{ListeningProcess, ProcessSearch};

use super::rpc_endpoint::shortened;
use super::write_stdout;
use follow::FollowLimit;
use nvme_functions::FunctionWithUsers;
use tenmil_devices::MODELS;

/// List the NVMe SSDs of this machine, the emulated SSDs, the block device kinds and the tenmil
/// processes that run.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ListArguments {
    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Print NVMe functions as they are added, changed and removed, one per line, until Ctrl-C
    #[arg(long)]
    follow: bool,

    /// Stop after this many changes
    #[arg(long, value_name = "N", requires = "follow", value_parser = super::perf::parse_integer::<u64>)]
    count: Option<u64>,

    /// Stop after this time, such as 10 or 500ms
    #[arg(short, long, value_name = "TIME", requires = "follow", value_parser = parse_time)]
    time: Option<Span>,
}

const EXAMPLES: &str = "\
Examples:
  tenmil list
  sudo tenmil list                              also which processes have an SSD open
  tenmil list --json | jq '.pci[].address'
  tenmil list --json | jq '.processes[].socket'
  tenmil list --follow --json                   a line for each SSD that is put in or pulled

`tenmil bind` binds an SSD to vfio-pci; docs/operator/bind-an-ssd.md lists the refusals.";

/// Emulated SSDs that are not models of a product.
const MEDIA: [(&str, &str); 3] = [
    ("emu:null", "completes commands, transfers no data: the cost of the driver alone"),
    ("emu:ram", "keeps its blocks in memory"),
    ("emu:file:PATH", "keeps its blocks in a file"),
];

/// Block device kinds and what they are.
const BLOCK: [(&str, &str); 15] = [
    ("null:", "completes requests, transfers no data, without a driver"),
    ("ram:SIZE", "blocks in memory"),
    ("file:PATH", "blocks in a file or on a block device; the path alone if it exists"),
    ("model:NAME", "blocks in memory, with the specified latency of a real device"),
    ("delay:[URI]", "another device, with delayed completions"),
    ("fault:[URI]", "another device that fails on purpose"),
    ("split:[URI]", "a part of another device"),
    ("stripe:[URI],[URI]", "several devices side by side"),
    ("mirror:[URI],[URI]", "every block on several devices"),
    ("volume:[URI]/NAME", "a volume of a pool; PATH/NAME if the pool is in a file"),
    ("crypt:[URI]", CRYPT),
    ("tcp://HOST/NQN/NSID", "a namespace of another machine, over NVMe/TCP"),
    ("vfio-user:PATH", "a controller of another process, at its socket"),
    ("rbd:POOL/IMAGE", "an image of a Ceph cluster, by librbd of this machine"),
    ("pcie:ADDRESS", "an SSD on the bus that `tenmil bind` has taken"),
];

#[cfg(feature = "crypt")]
const CRYPT: &str = "another device, encrypted";
#[cfg(not(feature = "crypt"))]
const CRYPT: &str = "another device, encrypted; not in this build, but with `--features crypt`";

/// Prints the lists, or follows changes with `--follow`.
pub(super) fn run_list(arguments: &ListArguments, out: &mut dyn Write) -> Result<ExitCode, Error> {
    if arguments.follow {
        let until = FollowLimit { count: arguments.count, time: arguments.time };
        return follow::follow_functions(until, arguments.json, out);
    }
    let functions = FunctionWithUsers::all_nvme(&KernelFiles::live_system());
    // Without a runtime directory no process listens.
    let processes = ProcessSearch::of_user().map(|search| search.all_processes());
    let processes = processes.ok().and_then(Result::ok).unwrap_or_default();
    let text = match arguments.json {
        true => list_json(&functions, &processes),
        false => list_text(&functions) + &processes_text(&processes),
    };
    write_stdout(out, &text)?;
    Ok(ExitCode::SUCCESS)
}

fn emulated_ssds() -> impl Iterator<Item = (String, &'static str)> {
    let media = MEDIA.into_iter().map(|(uri, words)| (uri.to_owned(), words));
    media.chain(MODELS.into_iter().map(|(name, words)| (format!("emu:model:{name}"), words)))
}

fn list_text(functions: &[FunctionWithUsers]) -> String {
    let mut text = String::from("emulated\n");
    for (uri, words) in emulated_ssds() {
        let _ = writeln!(text, "  {uri:<20}{words}");
    }
    text += "\nblock devices\n";
    for (uri, words) in BLOCK {
        let _ = writeln!(text, "  {uri:<20}{words}");
    }
    text += "\nNVMe functions on the PCI bus\n";
    text.extend(functions.iter().map(ToString::to_string));
    if functions.is_empty() {
        text += "  none\n";
    }
    text
}

/// One line for each process: identifier, name, user and command line.
fn processes_text(processes: &[ListeningProcess]) -> String {
    let mut text = String::from("\ntenmil processes\n");
    for ListeningProcess { pid, uid, instance, .. } in processes {
        let name = instance.as_deref().unwrap_or("-");
        let words = shortened(&command_line(*pid).unwrap_or_default());
        let _ = writeln!(text, "  {pid:<8}{name:<12}uid {uid:<8}{words}");
    }
    if processes.is_empty() {
        text += "  none\n";
    }
    text
}

fn process_json(process: &ListeningProcess) -> Value {
    let ListeningProcess { pid, uid, instance, socket } = process;
    json!({
        "pid": pid,
        "uid": uid,
        "instance": instance,
        "socket": socket.display().to_string(),
        "command_line": command_line(*pid),
    })
}

fn list_json(functions: &[FunctionWithUsers], processes: &[ListeningProcess]) -> String {
    let emulated: Vec<_> =
        emulated_ssds().map(|(uri, words)| json!({ "uri": uri, "what": words })).collect();
    let block = BLOCK.map(|(uri, words)| json!({ "uri": uri, "what": words }));
    let functions: Vec<_> = functions.iter().map(FunctionWithUsers::as_json).collect();
    let processes: Vec<_> = processes.iter().map(process_json).collect();
    let lists = json!({
        "emulated": emulated, "block": block, "pci": functions, "processes": processes,
    });
    format!("{lists:#}\n")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{BLOCK, list_json, list_text, processes_text};
    use tenmil_devices::Uri;
    use tenmil_linux::running_processes::ListeningProcess;

    #[test]
    fn machine_without_ssds_is_reported() {
        assert!(list_text(&[]).ends_with("NVMe functions on the PCI bus\n  none\n"));
    }

    #[test]
    fn processes_are_listed_with_their_names() {
        assert_eq!(processes_text(&[]), "\ntenmil processes\n  none\n");
        let instance = Some("db".to_owned());
        let process = ListeningProcess { pid: u32::MAX, uid: 7, instance, socket: "/s".into() };
        let text = processes_text(std::slice::from_ref(&process));
        assert!(text.contains("  4294967295db          uid 7"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&list_json(&[], &[process])).unwrap();
        assert_eq!(json["processes"][0]["instance"], "db");
    }

    #[test]
    fn listed_device_kinds_are_the_registered_ones() {
        let regions = tenmil_dma::RegionTable::new(1);
        let clock = tenmil_linux::Clock::start();
        let opener =
            tenmil_block::Opener { regions: &regions, clock, seed: 1, kinds: tenmil::KINDS };
        let refused = opener.open(&"tape:0".parse().unwrap()).unwrap_err().to_string();
        let known = refused.split_once("expected one of ").unwrap().1;
        let known = known.split_once(';').map_or(known, |(kinds, _)| kinds);
        let known: BTreeSet<&str> = known.split(", ").collect();
        let listed = BLOCK.map(|(uri, _)| &uri[..=uri.find(':').unwrap()]);
        let listed: BTreeSet<&str> = listed.into_iter().chain(["emu:"]).collect();
        assert_eq!(listed, known);
    }

    #[test]
    fn every_listed_emulated_ssd_is_a_valid_uri() {
        let json: serde_json::Value = serde_json::from_str(&list_json(&[], &[])).unwrap();
        let listed = json["emulated"].as_array().unwrap();
        assert_eq!(listed.len(), 5);
        for entry in listed {
            entry["uri"].as_str().unwrap().parse::<Uri>().unwrap();
        }
    }
}
