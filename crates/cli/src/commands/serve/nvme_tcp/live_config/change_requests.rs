//! Changes of the live configuration that clients of the control socket request.
//!
//! ```text
//!   edit the text ─ parse ─ prepare ─ write the file ─ commit ─ answer, event
//!        │             │         │            │
//!        └─────────────┴─────────┴────────────┴─ refused: nothing has changed, neither here nor in the file
//! ```
//!
//! The file is written before the new objects become visible, so a process that is killed in between
//! starts again with what the file has: the former configuration or the new one.

use std::net::SocketAddr;
use std::path::Path;

use tenmil_base::Error;
use tenmil_linux::storage_file::{ReplaceError, replace_text};
use tenmil_rpc::target_config::TargetConfig;
use tenmil_rpc::{
    ConfigurationAction, ConfigurationChange, ConfigurationRequest, ErrorCode, EventSender,
    RpcError,
};

use super::{
    AppliedChanges, ChangeSource, ConfigWithText, LiveConfig, check_fixed_settings, security,
};
use crate::commands::serve::event_log;

impl LiveConfig {
    /// Executes a request other than a reload, answers it and emits its event.
    pub(in crate::commands::serve::nvme_tcp) fn execute_request(
        &mut self,
        request: ConfigurationRequest,
        events: Option<&EventSender>,
    ) {
        let before = self.context.published.served();
        let action = request.action.name();
        let done = self.change(&request.action);
        let file = self.context.file.as_ref().map(|path| path.display().to_string());
        event_log::log_configuration_change(
            (&request.client, &action),
            file.as_deref(),
            done.as_ref(),
        );
        let after = self.context.published.served();
        let served = [before.as_deref(), after.as_deref()];
        request.answer(done.as_ref().map_err(RpcError::clone), served, events);
    }

    /// Changes the configuration and the file, or neither.
    fn change(&mut self, action: &ConfigurationAction) -> Result<ConfigurationChange, RpcError> {
        let name = action.name();
        let (text, is_dry_run) = match action {
            ConfigurationAction::Edit(edit) => {
                let bound: Vec<SocketAddr> = self.addresses().collect();
                (edit.edit_text(&self.text, &bound)?, false)
            }
            ConfigurationAction::Apply { text, is_dry_run } => (text.clone(), *is_dry_run),
            // The main loop has done it.
            ConfigurationAction::Reload => return Ok(ConfigurationChange::default()),
        };
        let is_edit = matches!(action, ConfigurationAction::Edit(_));
        let config = TargetConfig::parse(&text).map_err(|wrong| {
            let place = if is_edit {
                wrong.key.clone()
            } else {
                format!("line {}, {}", wrong.line, wrong.key)
            };
            RpcError::usage(ErrorCode::Failed, format!("{name}: {place}: {}", wrong.problem))
        })?;
        let difference =
            self.configuration.as_ref().map_or_else(Vec::new, |now| now.difference_to(&config));
        if is_dry_run {
            if let Some(now) = &self.configuration {
                check_fixed_settings(now, &config)
                    .and_then(|()| security::read_security(&config).map(drop))
                    .map_err(|unfit| rpc_error(unfit.of_edit(&name)))?;
            }
            return Ok(ConfigurationChange { difference, ..ConfigurationChange::default() });
        }
        let (file, former) = (self.context.file.clone(), self.text.clone());
        let save = || save_text(file.as_deref(), &former, &text);
        let requested = ConfigWithText { config, text: text.clone() };
        let applied = self.apply_and_save(requested, ChangeSource::Local, save);
        let AppliedChanges { done, failed } =
            applied.map_err(|unfit| rpc_error(unfit.of_edit(&name)))?;
        Ok(ConfigurationChange {
            difference,
            changes: done,
            failed,
            saved_to: self.context.file.clone(),
        })
    }
}

/// Writes the configuration to its file. The warning of the result is a text that may be lost with the power.
pub(super) fn save_text(
    file: Option<&Path>,
    former: &str,
    text: &str,
) -> Result<Option<String>, Error> {
    let Some(path) = file else { return Ok(None) };
    match replace_text(path, former, text) {
        Ok(()) => Ok(None),
        Err(warning @ ReplaceError::NotDurable(..)) => Ok(Some(warning.to_string())),
        // Applied before it was written here, by an editor that has saved what is wanted.
        Err(ReplaceError::Changed) if is_text_of(path, text) => Ok(None),
        Err(error @ ReplaceError::Changed) => {
            let text = format!("{}: {error}, expected as it is served", path.display());
            let hint = "`tenmil reload` applies the file as it is now; then repeat the change";
            Err(Error::usage(text).with_hint(hint))
        }
        Err(error @ ReplaceError::NotReplaced(..)) => {
            let hint = format!(
                "the user of the server must be able to write {} and its directory, and a server with \
                 --sandbox-path needs one for that directory",
                path.display()
            );
            Err(Error::environment(error.to_string()).with_hint(hint))
        }
    }
}

fn is_text_of(path: &Path, text: &str) -> bool {
    tenmil_linux::storage_file::read_text(path).is_ok_and(|found| found == text)
}

fn rpc_error(refused: Error) -> RpcError {
    let mut error = RpcError::usage(ErrorCode::Failed, refused.text.clone());
    error.category = refused.category();
    match refused.hint() {
        Some(hint) => error.with_hint(hint.to_owned()),
        None => error,
    }
}
