//! Ask a controller what it is, and decode all it answers.
//!
//! Everything that can be asked without changing anything is asked: registers, Identify, log pages
//! and features. A field is shown because the structure declares it, never because somebody thought
//! of it here. What a controller does not answer is listed with the status it gave.

mod block;
mod features;
mod logs;
mod pages;
pub mod show;

use wire::layout::Decoded;
use wire::{Command, Layout, Status};

use crate::{EmuSpec, Refused};

pub use self::block::{BlockDevice, block_device};

/// Brings up the SSD that a URI names, and lets somebody ask it things.
pub type WithController = fn(&EmuSpec, Ask<'_>) -> Result<(), Refused>;

/// Somebody who wants to ask a controller things.
pub type Ask<'a> = &'a mut dyn FnMut(&mut dyn Controller) -> Result<(), Refused>;

/// A controller that is ready for admin commands, in whatever way it is reached.
pub trait Controller {
    /// Reads the 32-bit register at `offset`.
    fn read32(&mut self, offset: usize) -> u32;
    /// Reads the 64-bit register at `offset`.
    fn read64(&mut self, offset: usize) -> u64;
    /// Has an admin command done that returns up to `len_bytes`; where they go is not said in
    /// `command`, and zero bytes need no memory. An error means that there was no answer in time.
    fn admin(&mut self, command: Command, len_bytes: u32) -> Result<Answer, Refused>;
}

/// The answer to an admin command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// How it ended.
    pub status: Status,
    /// Dword 0 of the completion.
    pub result: u32,
    /// What was returned; as long as was asked for.
    pub bytes: Vec<u8>,
}

/// All that a controller has answered.
#[derive(Clone, Debug, Default)]
pub struct Document {
    /// What was answered, in the order in which it was asked.
    pub sections: Vec<Section>,
    /// What was not, with the reason.
    pub unanswered: Vec<(String, Status)>,
    /// The namespaces that the controller shows to this host.
    pub namespaces: Vec<u32>,
    /// The host identifier has 16 bytes, as over fabrics it always has.
    has_long_host_id: bool,
}

/// One structure that was read.
#[derive(Clone, Debug)]
pub struct Section {
    /// Where it belongs: `["namespaces", "1", "identify"]`.
    pub path: Vec<String>,
    /// What it is, in words.
    pub title: String,
    /// What it holds, with the fields that the specification gives it.
    pub fields: Vec<Decoded>,
}

/// Asks `controller` all there is to ask.
pub fn interrogate(controller: &mut dyn Controller) -> Result<Document, Refused> {
    let mut document = Document::default();
    pages::read_registers(controller, &mut document);
    document.namespaces = pages::read_identify(controller, &mut document)?;
    logs::read(controller, &mut document)?;
    let first = document.namespaces.first().copied();
    features::read(controller, &mut document, first)?;
    Ok(document)
}

impl Document {
    /// Refuses if the controller does not show namespace `nsid` to this host.
    ///
    /// # Errors
    ///
    /// Says which ones it shows.
    pub fn require(&self, name: &str, nsid: u32) -> Result<(), Refused> {
        if self.namespaces.contains(&nsid) {
            return Ok(());
        }
        let shown: Vec<String> = self.namespaces.iter().map(u32::to_string).collect();
        let shown = match shown.is_empty() {
            true => "it shows none".to_owned(),
            false => format!("expected one of: {}", shown.join(", ")),
        };
        let text = format!("identify {name}: no namespace {nsid} is shown to this host, {shown}");
        Err(Refused::caller(text).with_hint(
            "if it is there, it is masked: add this host to the namespace's `hosts` where it is \
             served, or say who calls with `host=NQN`; without `ns=` everything else is printed",
        ))
    }

    fn add(&mut self, path: &[&str], title: impl Into<String>, fields: Vec<Decoded>) {
        let path = path.iter().map(|part| (*part).to_owned()).collect();
        self.sections.push(Section { path, title: title.into(), fields });
    }

    /// Has a command done. What it returned, or a note that it was not answered.
    fn ask(
        &mut self,
        controller: &mut dyn Controller,
        title: &str,
        command: Command,
        len_bytes: u32,
    ) -> Result<Option<Answer>, Refused> {
        let answer = controller.admin(command, len_bytes)?;
        if !answer.status.is_success() {
            self.unanswered.push((title.to_owned(), answer.status));
            return Ok(None);
        }
        if answer.bytes.len() < len_bytes as usize {
            return Err(Refused::peer(format!(
                "{title}: {} bytes came, expected {len_bytes}",
                answer.bytes.len()
            )));
        }
        Ok(Some(answer))
    }
}

/// The fields of `T` in `bytes`.
fn fields_of<T: Layout>(bytes: &[u8]) -> Vec<Decoded> {
    T::parse(bytes).map(|structure| structure.decode()).unwrap_or_default()
}

/// The fields of a structure of one dword.
fn fields_of_dword<T: Layout>(dword: u32) -> Vec<Decoded> {
    fields_of::<T>(&dword.to_le_bytes())
}

#[cfg(test)]
pub(crate) mod tests;
