//! `tenmil list`.

use std::fmt::Write as _;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use super::write_out;
use crate::pci::{self, NvmeFunction};
use crate::{MODELS, Refused};

/// List the SSDs of this machine, those that can be emulated, and the kinds of block devices.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  tenmil list --json | jq '.pci[].address'")]
pub(super) struct ListArguments {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Media of emulated SSDs that are not models.
const MEDIA: [(&str, &str); 3] = [
    ("emu:null", "answers and moves no data: the cost of the driver alone"),
    ("emu:ram", "keeps its blocks in memory"),
    ("emu:file:PATH", "keeps its blocks in a file"),
];

/// Other block devices, by how they are named.
const BLOCK: [(&str, &str); 11] = [
    ("null:", "answers and moves no data, without a driver in between"),
    ("ram:SIZE", "blocks in memory"),
    ("file:PATH", "blocks in a file or on a block device"),
    ("model:NAME", "blocks in memory, as slow as a real device is said to be"),
    ("delay:[URI]", "another device, with answers kept back"),
    ("fault:[URI]", "another device that fails on purpose"),
    ("split:[URI]", "a part of another device"),
    ("stripe:[URI],[URI]", "several devices side by side"),
    ("mirror:[URI],[URI]", "every block on several devices"),
    ("crypt:[URI]", "another device, encrypted"),
    ("tcp://HOST:PORT/NQN", "an SSD behind a network, over NVMe/TCP"),
];

/// Lists.
pub(super) fn run(arguments: &ListArguments, out: &mut dyn Write) -> Result<ExitCode, Refused> {
    let functions = pci::nvme_functions(Path::new(pci::DEVICES));
    let text = if arguments.json { as_json(&functions) } else { as_text(&functions) };
    write_out(out, &text)?;
    Ok(ExitCode::SUCCESS)
}

fn emulated() -> impl Iterator<Item = (String, &'static str)> {
    let media = MEDIA.into_iter().map(|(uri, words)| (uri.to_owned(), words));
    media.chain(MODELS.into_iter().map(|(name, words)| (format!("emu:model:{name}"), words)))
}

fn as_text(functions: &[NvmeFunction]) -> String {
    let mut text = String::from("emulated, for anybody\n");
    for (uri, words) in emulated() {
        let _ = writeln!(text, "  {uri:<20}{words}");
    }
    text += "\nblock devices\n";
    for (uri, words) in BLOCK {
        let _ = writeln!(text, "  {uri:<20}{words}");
    }
    text += "\nNVMe functions on the PCI bus\n";
    for function in functions {
        let driver = function.driver.as_deref().unwrap_or("none");
        let _ = writeln!(
            text,
            "  {:<20}{:04x}:{:04x}  driver {driver}",
            function.address, function.vendor, function.device
        );
    }
    if functions.is_empty() {
        text += "  none\n";
    }
    text
}

fn as_json(functions: &[NvmeFunction]) -> String {
    let emulated: Vec<_> =
        emulated().map(|(uri, words)| json!({ "uri": uri, "what": words })).collect();
    let block = BLOCK.map(|(uri, words)| json!({ "uri": uri, "what": words }));
    let functions: Vec<_> = functions
        .iter()
        .map(|function| {
            json!({
                "address": function.address,
                "vendor": function.vendor,
                "device": function.device,
                "driver": function.driver,
                "numa_node": function.numa_node,
            })
        })
        .collect();
    format!("{:#}\n", json!({ "emulated": emulated, "block": block, "pci": functions }))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{BLOCK, as_json, as_text};
    use crate::Uri;
    use crate::pci::NvmeFunction;

    fn function() -> NvmeFunction {
        NvmeFunction {
            address: "0000:5e:00.0".into(),
            vendor: 0x8086,
            device: 0x0a54,
            driver: Some("nvme".into()),
            numa_node: Some(1),
        }
    }

    #[test]
    fn a_function_is_shown_with_its_driver() {
        assert!(as_text(&[function()]).contains("  0000:5e:00.0        8086:0a54  driver nvme\n"));
        assert!(as_text(&[]).ends_with("NVMe functions on the PCI bus\n  none\n"));
        let json: serde_json::Value = serde_json::from_str(&as_json(&[function()])).unwrap();
        assert_eq!(json["pci"][0]["driver"], "nvme");
        assert_eq!(json["pci"][0]["device"], 0x0a54);
    }

    #[test]
    fn every_kind_that_is_listed_is_known() {
        let regions = dma::Regions::new(1);
        let clock = host::Clock::start();
        let opener = block::Opener { regions: &regions, clock, seed: 1, more: crate::KINDS };
        let refused = opener.open(&"tape:0".parse().unwrap()).unwrap_err().to_string();
        let known = refused.split_once("expected one of ").unwrap().1;
        let known: BTreeSet<&str> = known.split(", ").collect();
        for (uri, _) in BLOCK {
            assert!(known.contains(&uri[..=uri.find(':').unwrap()]), "{uri} of {known:?}");
        }
    }

    #[test]
    fn every_emulated_ssd_that_is_listed_can_be_named() {
        let json: serde_json::Value = serde_json::from_str(&as_json(&[])).unwrap();
        let listed = json["emulated"].as_array().unwrap();
        assert_eq!(listed.len(), 5);
        for entry in listed {
            entry["uri"].as_str().unwrap().parse::<Uri>().unwrap();
        }
    }
}
