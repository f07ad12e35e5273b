# What `cmake --install` puts under a prefix: a C library and the package that names it.
include(CMakePackageConfigHelpers)

# install_package(TARGET PACKAGE VERSION COMPONENT [EXCLUDE_FROM_ALL]), for find_package(PACKAGE).
function(install_package target package version component)
  set(folder share/cmake/${package})
  set(config ${PROJECT_BINARY_DIR}/${package}Config.cmake)
  set(config_version ${PROJECT_BINARY_DIR}/${package}ConfigVersion.cmake)
  set(rest COMPONENT ${component} ${ARGN})
  install(
    TARGETS ${target}
    EXPORT ${package}Targets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ${rest}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} ${rest}
    RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} ${rest}
    INCLUDES
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT ${package}Targets DESTINATION ${folder} ${rest})
  configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/${package}Config.cmake.in ${config}
                                INSTALL_DESTINATION ${folder})
  write_basic_package_version_file(${config_version} VERSION ${version}
                                   COMPATIBILITY SameMinorVersion)
  install(FILES ${config} ${config_version} DESTINATION ${folder} ${rest})
endfunction()

# What holds for libmlxh2oc whichever mlx-c it stands on.
macro(finish_c_library)
  target_include_directories(
    mlxh2oc PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/mlx-c/h2o/include>)
  target_link_libraries(mlxh2oc PRIVATE $<BUILD_INTERFACE:mlx_h2o_flags>)
  set_target_properties(mlxh2oc PROPERTIES CXX_VISIBILITY_PRESET default
                                           UNITY_BUILD ${MLX_H2O_UNITY_BUILD})
  file(STRINGS CHANGELOG.md _version REGEX "^## [0-9]" LIMIT_COUNT 1) # the newest
  string(REGEX MATCH "[0-9.]+" _version "${_version}")
  install_package(mlxh2oc MLXH2OC ${_version} mlxh2oc)
  install(DIRECTORY mlx-c/h2o/include/mlx_h2o DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
          COMPONENT mlxh2oc)
endmacro()
