//! Identify data of a controller, read and decoded.
//!
//! Reads everything that can be read without side effects: registers, Identify data, log pages and
//! features. Fields come from the declarations of the wire structures, so every declared field is
//! shown. Commands that the controller rejects are listed with their status.

mod features;
mod logs;
mod pages;
pub mod show;

use tenmil_wire::layout::DecodedField;
use tenmil_wire::{Command, Layout, Status};

use crate::EmuSpec;
use tenmil_base::Error;

/// Attaches the SSD of a URI and calls a function with its controller.
pub type WithAdminAccessFn = fn(&EmuSpec, AdminAccessFn<'_>) -> Result<(), Error>;

/// Function that is called with a controller.
pub type AdminAccessFn<'a> = &'a mut dyn FnMut(&mut dyn AdminAccess) -> Result<(), Error>;

/// Controller that accepts admin commands, independent of the transport.
pub trait AdminAccess {
    /// Reads the 32-bit register at `offset`.
    fn read32(&mut self, offset: usize) -> u32;
    /// Reads the 64-bit register at `offset`.
    fn read64(&mut self, offset: usize) -> u64;
    /// Executes an admin command that returns up to `len_bytes`. The data pointer of `command` is set
    /// by the implementation; zero bytes need no buffer. An error means that the command did not
    /// complete in time.
    fn execute_admin(&mut self, command: Command, len_bytes: u32) -> Result<AdminResult, Error>;
}

/// Completion of an admin command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminResult {
    /// Status code.
    pub status: Status,
    /// Dword 0 of the completion.
    pub result: u32,
    /// Data returned, of the requested length.
    pub bytes: Vec<u8>,
}

/// All data read from a controller.
#[derive(Clone, Debug, Default)]
pub struct IdentifyDocument {
    /// Structures read, in order.
    pub sections: Vec<Section>,
    /// Commands that the controller rejected, with the status.
    pub rejected: Vec<(String, Status)>,
    /// Active namespaces visible to this host.
    pub namespaces: Vec<u32>,
    /// Whether host identifiers have 128 bits, as they always have over fabrics.
    has_long_host_id: bool,
}

/// One structure read from the controller.
#[derive(Clone, Debug)]
pub struct Section {
    /// Path in the JSON document: `["namespaces", "1", "identify"]`.
    pub path: Vec<String>,
    /// Title for people.
    pub title: String,
    /// Fields in the order of the specification.
    pub fields: Vec<DecodedField>,
}

/// Reads everything from `controller`.
pub fn interrogate(controller: &mut dyn AdminAccess) -> Result<IdentifyDocument, Error> {
    let mut document = IdentifyDocument::default();
    pages::read_registers(controller, &mut document);
    document.namespaces = pages::read_identify(controller, &mut document)?;
    logs::read(controller, &mut document)?;
    let first = document.namespaces.first().copied();
    features::read(controller, &mut document, first)?;
    Ok(document)
}

impl IdentifyDocument {
    /// Checks that namespace `nsid` is visible to this host.
    ///
    /// # Errors
    ///
    /// Names the visible namespaces.
    pub fn require_namespace(&self, name: &str, nsid: u32) -> Result<(), Error> {
        if self.namespaces.contains(&nsid) {
            return Ok(());
        }
        let shown: Vec<String> = self.namespaces.iter().map(u32::to_string).collect();
        let shown = match shown.is_empty() {
            true => "it shows none".to_owned(),
            false => format!("expected one of: {}", shown.join(", ")),
        };
        let text = format!("identify {name}: no namespace {nsid} is shown to this host, {shown}");
        Err(Error::usage(text).with_hint(
            "if it is there, it is masked: add this host to the namespace's `allowed-hosts` where it is \
             served, or name this host with `hostnqn=NQN`; without `ns=` everything else is printed",
        ))
    }

    fn add(&mut self, path: &[&str], title: impl Into<String>, fields: Vec<DecodedField>) {
        let path = path.iter().map(|part| (*part).to_owned()).collect();
        self.sections.push(Section { path, title: title.into(), fields });
    }

    /// Executes a command. Returns the result, or records that the controller rejected the command.
    fn execute(
        &mut self,
        controller: &mut dyn AdminAccess,
        title: &str,
        command: Command,
        len_bytes: u32,
    ) -> Result<Option<AdminResult>, Error> {
        let result = controller.execute_admin(command, len_bytes)?;
        if !result.status.is_success() {
            self.rejected.push((title.to_owned(), result.status));
            return Ok(None);
        }
        if result.bytes.len() < len_bytes as usize {
            return Err(Error::remote(format!(
                "{title}: received {} bytes, expected {len_bytes}",
                result.bytes.len()
            )));
        }
        Ok(Some(result))
    }
}

/// Decodes the fields of `T` in `bytes`.
fn fields_of<T: Layout>(bytes: &[u8]) -> Vec<DecodedField> {
    T::parse(bytes).map(|structure| structure.decode_fields()).unwrap_or_default()
}

/// Decodes the fields of a structure of one dword.
fn fields_of_dword<T: Layout>(dword: u32) -> Vec<DecodedField> {
    fields_of::<T>(&dword.to_le_bytes())
}

#[cfg(test)]
pub mod tests;
