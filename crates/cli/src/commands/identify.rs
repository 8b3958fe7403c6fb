//! `tenmil identify`: shows what a device reports about itself.

mod document_json;

use std::io::Write;
use std::process::ExitCode;

use clap::Args;

use super::{CommandEngines, write_stdout};
use tenmil_devices::identify::{IdentifyDocument, interrogate, show};

use self::document_json::document_json;
use super::identify_block::identify_block_device;
use tenmil_base::Error;
use tenmil_devices::{EmuSpec, PcieUri, TcpUri, Uri, VfioUserUri};

/// Show what a device reports about itself. For an SSD: registers, Identify data, log pages and
/// features, decoded. For any other block device: size, limits, operations, durability and signatures.
///
/// Read-only: pending asynchronous events stay pending. A namespace given by `ns=` that is not attached
/// to this host is an error.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct IdentifyArguments {
    /// Device, such as emu:null, ram:1g or file:/var/tmp/disk
    #[arg(value_name = "URI", value_parser = parse_uri)]
    uri: Uri,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Also show fields that are zero
    #[arg(long)]
    all: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil identify emu:null
  tenmil identify /var/tmp/disk
  tenmil identify /dev/sda
  tenmil identify tcp://127.0.0.1/nqn.2024-01.example:disk/2
  tenmil identify vfio-user:/tmp/disk.sock
  tenmil identify pcie:0000:5e:00.0
  tenmil identify emu:null --json | jq .controller.identify.mn";

fn parse_uri(text: &str) -> Result<Uri, Error> {
    let uri: Uri = text.parse()?;
    match uri.count() {
        1 => Ok(uri),
        count => Err(Error::usage(format!("{text}: {count} SSDs are named, expected one"))),
    }
}

/// Reads the device and prints the result.
pub(super) fn run_identify(
    arguments: &IdentifyArguments,
    engines: &CommandEngines,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let text = match &arguments.uri {
        Uri::Emu(spec) => identify_ssd(spec, arguments, engines)?,
        Uri::Block(uri) if uri.scheme() == TcpUri::SCHEME => {
            let mut document = IdentifyDocument::default();
            tenmil_devices::tcp::with_controller(&TcpUri::from_uri(uri)?, &mut |controller| {
                document = interrogate(controller)?;
                Ok(())
            })?;
            check_namespace_attached(uri, &document)?;
            format_document(&document, arguments)
        }
        Uri::Block(uri) if uri.scheme() == VfioUserUri::SCHEME => {
            let mut document = IdentifyDocument::default();
            tenmil_devices::vfio_user::with_controller(
                &VfioUserUri::from_uri(uri)?,
                &mut |controller| {
                    document = interrogate(controller)?;
                    Ok(())
                },
            )?;
            check_namespace_attached(uri, &document)?;
            format_document(&document, arguments)
        }
        Uri::Block(uri) if uri.scheme() == PcieUri::SCHEME => {
            let mut document = IdentifyDocument::default();
            tenmil_devices::pcie::with_controller(&PcieUri::from_uri(uri)?, &mut |controller| {
                document = interrogate(controller)?;
                Ok(())
            })?;
            check_namespace_attached(uri, &document)?;
            format_document(&document, arguments)
        }
        Uri::Block(uri) => {
            let device = identify_block_device(uri)?;
            if arguments.json { device.json() } else { device.text() }
        }
    };
    write_stdout(out, &text)?;
    Ok(ExitCode::SUCCESS)
}

/// Checks that the namespace of the URI, if it names one, is attached to this host.
fn check_namespace_attached(
    uri: &tenmil_block::uri::Uri,
    document: &IdentifyDocument,
) -> Result<(), Error> {
    let named = uri.options().number_value("ns", 1..=u64::from(u32::MAX - 1))?;
    let named = named.and_then(|nsid| u32::try_from(nsid).ok());
    named.map_or(Ok(()), |nsid| document.require_namespace(&uri.to_string(), nsid))
}

fn identify_ssd(
    spec: &EmuSpec,
    arguments: &IdentifyArguments,
    engines: &CommandEngines,
) -> Result<String, Error> {
    let mut document = IdentifyDocument::default();
    (engines.identify)(spec, &mut |controller| {
        document = interrogate(controller)?;
        Ok(())
    })?;
    Ok(format_document(&document, arguments))
}

fn format_document(document: &IdentifyDocument, arguments: &IdentifyArguments) -> String {
    if arguments.json { document_json(document) } else { show::text(document, arguments.all) }
}
